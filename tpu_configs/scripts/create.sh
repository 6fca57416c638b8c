#!/usr/bin/env bash
# Requests a slice and waits until it is there. It costs from then until delete.sh.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'USAGE'
usage: create.sh [--dry-run] [-- GCLOUD_FLAG ...]
Requests a TPU slice as a queued resource, and waits until it is ACTIVE.
A slice that is ACTIVE costs by the hour, busy or not, until delete.sh.

  PROJECT ZONE NAME TYPE RUNTIME   required
  SPOT=1                           cheaper, and may be taken away at any time
  POLLS=120 POLL_SECONDS=30        how long it waits; later no slice is given either

example:
  PROJECT=my-project ZONE=us-west4-a NAME=jaxspec-batch TYPE=v5litepod-8 \
      RUNTIME=v2-alpha-tpuv5-lite SPOT=1 tpu_configs/scripts/create.sh --dry-run
USAGE
}

parse extra "$@"
need PROJECT ZONE NAME TYPE RUNTIME
SPOT=${SPOT:-0} POLLS=${POLLS:-120} POLL_SECONDS=${POLL_SECONDS:-30}
[[ $SPOT =~ ^[01]$ ]] || die "SPOT is $SPOT, expected 1 or 0" 2
[[ $POLLS =~ ^[1-9][0-9]{0,5}$ ]] || die "POLLS is $POLLS, expected 1 or more" 2
[[ $POLL_SECONDS =~ ^(0|[1-9][0-9]{0,4})$ ]] ||
  die "POLL_SECONDS is $POLL_SECONDS, expected seconds" 2

where=(--project="$PROJECT" --zone="$ZONE")
describe=(gcloud compute tpus queued-resources describe "$NAME" "${where[@]}"
  "--format=value(state.state)")

create() {
  # Nothing may begin to cost once nobody waits for it.
  local flags=(--valid-until-duration="$((POLLS * POLL_SECONDS + 60))s")
  ((SPOT == 0)) || flags+=(--spot)
  run gcloud compute tpus queued-resources create "$NAME" "${where[@]}" \
    --node-id="$NAME" --accelerator-type="$TYPE" --runtime-version="$RUNTIME" \
    "${flags[@]}" ${EXTRA[@]+"${EXTRA[@]}"}
}

wait_until_active() {
  local poll state
  # Shown once, asked often.
  quoted "${describe[@]}" >&3
  for ((poll = 0; poll < POLLS; poll++)); do
    # A question that fails is asked again: the slice may be there and cost.
    state=$("${describe[@]}" 3>&-) || state=unknown
    complain "$NAME is $state"
    case $state in
      ACTIVE) return ;;
      FAILED | SUSPENDING | SUSPENDED | DELETING)
        die "$NAME will not become ACTIVE: delete.sh, then create.sh again"
        ;;
    esac
    sleep "$POLL_SECONDS"
  done
  die "$NAME is $state after $POLLS polls; see status.sh, and delete.sh to give it up"
}

create
if [[ -n $DRY_RUN ]]; then
  run "${describe[@]}"
  exit
fi
wait_until_active
complain "$NAME costs from now on, until delete.sh"

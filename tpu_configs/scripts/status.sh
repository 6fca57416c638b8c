#!/usr/bin/env bash
# Says whether a slice is waited for, there (and costs), or taken away.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'USAGE'
usage: status.sh [--dry-run]
Says the state of a slice: ACTIVE costs; SUSPENDED was taken away.

  PROJECT ZONE NAME   required

example:
  PROJECT=my-project ZONE=us-west4-a NAME=jaxspec-batch \
      tpu_configs/scripts/status.sh --dry-run
USAGE
}

parse none "$@"
need PROJECT ZONE NAME
run gcloud compute tpus queued-resources describe "$NAME" --project="$PROJECT" \
  --zone="$ZONE" "--format=value(state.state)"

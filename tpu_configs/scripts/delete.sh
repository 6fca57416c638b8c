#!/usr/bin/env bash
# Deletes a slice, and with it all that is on its disks. It costs nothing from then on.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'USAGE'
usage: delete.sh [--dry-run]
Deletes a slice without asking, whatever runs there. What is on gs:// stays.

  PROJECT ZONE NAME   required

example:
  PROJECT=my-project ZONE=us-west4-a NAME=jaxspec-batch \
      tpu_configs/scripts/delete.sh --dry-run
USAGE
}

parse none "$@"
need PROJECT ZONE NAME
# --force deletes the slice too, and not only a request that has none.
run gcloud compute tpus queued-resources delete "$NAME" --project="$PROJECT" \
  --zone="$ZONE" --force --quiet

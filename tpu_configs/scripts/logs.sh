#!/usr/bin/env bash
# Shows what a job says, as it says it.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'USAGE'
usage: logs.sh [--dry-run]
Streams the log of one worker, or of all, until it is interrupted; the job goes on.

  PROJECT ZONE NAME   required
  WORKER=0            which worker: a number, 0-3, or all

example:
  PROJECT=my-project ZONE=us-west4-a NAME=jaxspec-batch WORKER=all \
      tpu_configs/scripts/logs.sh --dry-run
USAGE
}

parse none "$@"
need PROJECT ZONE NAME
WORKER=${WORKER:-0}
[[ $WORKER =~ ^(all|[0-9]+(-[0-9]+)?)$ ]] ||
  die "WORKER is $WORKER, expected a number, 0-3, or all" 2
# shellcheck disable=SC2016  # The worker's name, not this machine's.
on_workers "$WORKER" 'tail -n 100 -F jaxspec.log | sed -u "s/^/$(hostname): /"'

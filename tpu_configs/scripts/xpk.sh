#!/usr/bin/env bash
# Starts a job on a GKE cluster that xpk manages.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'USAGE'
usage: xpk.sh [--dry-run] [-- XPK_FLAG ...]
Submits `jaxspec batch` as a workload of xpk, which starts it again when it is
interrupted: it goes on where it was.

  PROJECT ZONE CLUSTER NAME TYPE IMAGE CONFIG INPUT OUTPUT   required
  MAX_RESTARTS=10                                            how often

example:
  PROJECT=my-project ZONE=us-west4-a CLUSTER=my-cluster NAME=jaxspec-batch \
      TYPE=v5litepod-256 IMAGE=gcr.io/my-project/jaxspec:1 \
      CONFIG=tpu_configs/v5e-256.yaml INPUT=gs://my-bucket/prompts.jsonl \
      OUTPUT=gs://my-bucket/answers.jsonl tpu_configs/scripts/xpk.sh --dry-run
USAGE
}

parse extra "$@"
need PROJECT ZONE CLUSTER NAME TYPE IMAGE CONFIG INPUT OUTPUT
MAX_RESTARTS=${MAX_RESTARTS:-10}
[[ $MAX_RESTARTS =~ ^[0-9]{1,4}$ ]] ||
  die "MAX_RESTARTS is $MAX_RESTARTS, expected a number" 2

# In base64 the file passes every shell and YAML on its way.
job=$(base64 < "$CONFIG" | tr -d '\n')
# Pods of a slice start minutes apart: they wait for each other.
command="echo $job | base64 -d > job.yaml && $(quoted jaxspec batch job.yaml \
  --input "$INPUT" --output "$OUTPUT" --distributed --timeout 900)"
# By itself xpk takes the end of a process for success, as when its peer was taken away.
run xpk workload create --project="$PROJECT" --zone="$ZONE" --cluster="$CLUSTER" \
  --workload="$NAME" --tpu-type="$TYPE" --num-slices=1 --docker-image="$IMAGE" \
  --max-restarts="$MAX_RESTARTS" --restart-on-user-code-failure \
  --command="$command" ${EXTRA[@]+"${EXTRA[@]}"}

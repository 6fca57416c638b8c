#!/usr/bin/env bash
# Starts a job on all workers of a slice, or goes on with one that was stopped.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'USAGE'
usage: run.sh [--dry-run] [-- JAXSPEC_FLAG ...]
Starts `jaxspec batch` on all workers at once, detached: it does not end with this
connection. The same command again goes on where the job was stopped.

  PROJECT ZONE NAME CONFIG INPUT OUTPUT   required
  MODEL_CACHE=DIRECTORY                   where the workers keep models (HF_HOME)

example:
  PROJECT=my-project ZONE=us-west4-a NAME=jaxspec-batch \
      CONFIG=tpu_configs/v5e-8.yaml INPUT=gs://my-bucket/prompts.jsonl \
      OUTPUT=gs://my-bucket/answers.jsonl tpu_configs/scripts/run.sh --dry-run
USAGE
}

parse extra "$@"
need PROJECT ZONE NAME CONFIG INPUT OUTPUT

job_command() {
  if [[ -n ${MODEL_CACHE:-} ]]; then
    # The token of setup.sh stays where it is.
    echo "export HF_TOKEN_PATH=\"\$HOME/.cache/huggingface/token\""
    quoted export HF_HOME="$MODEL_CACHE"
  fi
  # A second job on a worker would find its chips taken, and write to the same log.
  echo "flock -n jaxspec.lock true ||" \
    "{ echo 'a job runs here already: see logs.sh' >&2; exit 1; }"
  echo "nohup flock -n jaxspec.lock $(quoted jaxspec-venv/bin/jaxspec batch \
    jaxspec.yaml --input "$INPUT" --output "$OUTPUT" --distributed \
    ${EXTRA[@]+"${EXTRA[@]}"}) >> jaxspec.log 2>&1 < /dev/null &"
}

to_workers "$CONFIG" jaxspec.yaml
on_workers all "$(job_command)"

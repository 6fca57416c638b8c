# Sourced by the scripts beside it: arguments, required variables, `run`.
# Kept to what bash 3.2 knows, the one that macOS has.
# shellcheck shell=bash
set -euo pipefail

SCRIPT=${0##*/}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DRY_RUN=
# What follows `--`, in the scripts that hand it on.
# shellcheck disable=SC2034
EXTRA=()
# Commands are shown on the script's own stdout also where their output is captured.
exec 3>&1

complain() {
  printf '%s: %s\n' "$SCRIPT" "$1" >&2
}

die() {
  complain "$1"
  exit "${2:-1}"
}

# Reads `--dry-run`, `--help` and, if $1 is "extra", what follows `--`.
parse() {
  local takes_extra=$1
  shift
  while (($#)); do
    case $1 in
      --dry-run) DRY_RUN=1 ;;
      -h | --help)
        usage
        exit 0
        ;;
      --)
        [[ $takes_extra == extra ]] || die "nothing can follow --; see --help" 2
        shift
        # shellcheck disable=SC2034
        EXTRA=("$@")
        return
        ;;
      *) die "unknown argument $1; see --help" 2 ;;
    esac
    shift
  done
}

# What a variable is, and an example.
meaning() {
  case $1 in
    PROJECT) echo "the Google Cloud project that is billed, such as my-project" ;;
    ZONE) echo "the zone of the slice, such as us-west4-a" ;;
    NAME) echo "the name of the slice or workload, such as jaxspec-batch" ;;
    TYPE) echo "the accelerator type, such as v5litepod-8, v6e-8 or v5p-32" ;;
    RUNTIME) echo "the TPU software version, such as v2-alpha-tpuv5-lite" ;;
    CONFIG) echo "the job, such as tpu_configs/v5e-8.yaml" ;;
    INPUT) echo "the prompts, such as gs://my-bucket/prompts.jsonl" ;;
    OUTPUT) echo "the answers to be, such as gs://my-bucket/answers.jsonl" ;;
    CLUSTER) echo "the GKE cluster, such as my-cluster" ;;
    IMAGE) echo "an image with jaxspec, such as gcr.io/my-project/jaxspec:1" ;;
  esac
}

# Refuses, in one message, all that is missing or cannot be right.
need() {
  local variable faults=0
  for variable; do
    if [[ -z ${!variable:-} ]]; then
      complain "$variable is not set: $(meaning "$variable")"
    elif ! is_plausible "$variable" "${!variable}"; then
      complain "$variable is ${!variable}, expected $(meaning "$variable")"
    else
      continue
    fi
    faults=1
  done
  ((faults == 0)) || exit 2
}

is_plausible() {
  case $1 in
    # Nothing that gcloud would read as a flag, or as a path in another project.
    NAME) [[ $2 =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] ;;
    # Each worker has a disk of its own, which goes with the slice.
    INPUT | OUTPUT) [[ $2 == gs://?*/?* ]] ;;
    CONFIG) [[ -f $2 ]] ;;
  esac
}

# Words as a shell reads them back.
quoted() {
  local word line=
  for word; do
    if [[ ! $word =~ ^[-A-Za-z0-9_./:=@%+,]+$ ]]; then
      word="'$(printf %s "$word" | sed "s/'/'\\\\''/g")'"
    fi
    line+="${line:+ }$word"
  done
  printf '%s\n' "$line"
}

# Prints a command and, unless in a dry run, executes it.
run() {
  quoted "$@" >&3
  [[ -n $DRY_RUN ]] || "$@" 3>&-
}

on_workers() {
  local workers=$1 command=$2
  run gcloud compute tpus tpu-vm ssh "$NAME" --project="$PROJECT" --zone="$ZONE" \
    --worker="$workers" --command="$command"
}

to_workers() {
  run gcloud compute tpus tpu-vm scp "$1" "$NAME:$2" --project="$PROJECT" \
    --zone="$ZONE" --worker=all
}

# The version that pyproject.toml pins: of jaxspec itself, or of jax.
pinned() {
  local pattern='s/^version = "\(.*\)"$/\1/p'
  [[ $1 == jaxspec ]] || pattern='s/^ *"'$1'==\(.*\)",$/\1/p'
  sed -n "$pattern" "$HERE/../../pyproject.toml"
}

#!/usr/bin/env bash
# Installs jaxspec on all workers of a slice; again after each create.sh.
set -euo pipefail
# shellcheck source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

usage() {
  cat <<'USAGE'
usage: setup.sh [--dry-run]
Installs jaxspec-decoding[gcs] and jax[tpu], at the versions of pyproject.toml, in
~/jaxspec-venv of all workers.

  PROJECT ZONE NAME    required
  WHEEL=FILE           installs this wheel of jaxspec, and not the release
  HF_TOKEN_FILE=FILE   copied to the workers, for models that ask for consent

example:
  PROJECT=my-project ZONE=us-west4-a NAME=jaxspec-batch \
      WHEEL=dist/jaxspec_decoding-0.1.0-py3-none-any.whl \
      tpu_configs/scripts/setup.sh --dry-run
USAGE
}

parse none "$@"
need PROJECT ZONE NAME
WHEEL=${WHEEL:-} HF_TOKEN_FILE=${HF_TOKEN_FILE:-}
[[ -z $WHEEL || (-f $WHEEL && $WHEEL == *.whl) ]] ||
  die "WHEEL is $WHEEL, expected a .whl file" 2
[[ -z $HF_TOKEN_FILE || -f $HF_TOKEN_FILE ]] ||
  die "HF_TOKEN_FILE is $HF_TOKEN_FILE, expected a file" 2

# uv brings the Python: that of the TPU software (Ubuntu 22.04) is 3.10, too old.
UV_VERSION=0.9.26

install_command() {
  echo "set -eo pipefail"
  echo "[ -x .local/bin/uv ] ||" \
    "curl -LsSf https://astral.sh/uv/$UV_VERSION/install.sh | sh"
  echo "[ -d jaxspec-venv ] || .local/bin/uv venv --python 3.12 jaxspec-venv"
  # A wheel that was built again has the version that is there already.
  quoted .local/bin/uv pip install --python jaxspec-venv/bin/python \
    --reinstall-package jaxspec-decoding "$1" "jax[tpu]==$(pinned jax)"
  echo "jaxspec-venv/bin/jaxspec --help > /dev/null"
}

requirement="jaxspec-decoding[gcs]==$(pinned jaxspec)"
if [[ -n $WHEEL ]]; then
  to_workers "$WHEEL" ""
  requirement="./${WHEEL##*/}[gcs]"
fi
if [[ -n $HF_TOKEN_FILE ]]; then
  # As a file: what is on a command line is shown and logged.
  on_workers all "install -d -m 700 .cache/huggingface"
  to_workers "$HF_TOKEN_FILE" .cache/huggingface/token
fi
on_workers all "$(install_command "$requirement")"

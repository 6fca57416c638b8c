#!/usr/bin/env bash
# Makes the drafters of this folder again, each as `drafter.json` beside it says:
#
#     bash make.sh WORK_FOLDER
#
# The model writes its own texts, and four drafters learn from them. Every step goes on
# where it was interrupted. Needs the [plot] extra. RESULTS.md has the wall times.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
work="${1:?usage: bash make.sh WORK_FOLDER}"
mkdir -p "$work"
cd "$work"

learn() { # TEXTS KIND OUT OPTION...
    jaxspec train "$2" --data "$1" --out "$3" --optimizer muon --plot "${@:4}"
}
curves() { # OUT NAME: what a training has told of itself
    mkdir -p "$here/$2"
    cp "$1"/drafter.json "$1"/metrics.jsonl "$1"/curves.png "$here/$2"
}
ship() { # OUT NAME
    curves "$1" "$2"
    cp "$1"/*.safetensors "$here/$2"
    # Medusa heads have no config: their tensors say what they are.
    if [ -f "$1/config.json" ]; then cp "$1/config.json" "$here/$2"; fi
}

# Answers to questions that it asks itself, then to those of all kinds.
jaxspec train data --out texts --rows 16 --tokens 300000 --seed 0
python3 "$here/prompts.py" 2080 1 32 > prompts.jsonl
jaxspec train data --out asked --prompts prompts.jsonl --chat --rows 32 \
    --answer-tokens 128 --seed 1

# An EAGLE head: the next token alone, then three in a row from its own guesses. Each
# drafter learns from questions of its own first, then from those of all kinds.
learn texts eagle eagle-1 --depth 1 --steps 270 --check-every 45 --batch-size 16
learn texts eagle eagle-3 --from eagle-1 --depth 3 --steps 90 --check-every 10 \
    --batch-size 16 --learning-rate 0.001
learn asked eagle eagle-c --from eagle-3 --depth 3 --steps 240 --check-every 40 \
    --batch-size 16 --learning-rate 0.002
curves eagle-1 eagle/first
curves eagle-3 eagle/second
ship eagle-c eagle

learn texts medusa medusa --depth 3 --steps 240 --check-every 60 --learning-rate 0.01
learn texts medusa medusa-b --from medusa --depth 3 --steps 120 --check-every 60 \
    --learning-rate 0.005
learn asked medusa medusa-c --from medusa-b --depth 3 --steps 60 --check-every 20 \
    --learning-rate 0.005
curves medusa medusa/first
curves medusa-b medusa/second
ship medusa-c medusa

learn texts early-exit early-exit --layers 15 --depth 3 --steps 270 --check-every 90 \
    --learning-rate 0.003
ship early-exit early-exit

learn texts draft draft --layers 0,29 --steps 240 --check-every 60 --learning-rate 0.002
learn texts draft draft-b --from draft --layers 0,29 --steps 110 --check-every 22 \
    --learning-rate 0.001
learn asked draft draft-c --from draft-b --layers 0,29 --steps 60 --check-every 20 \
    --learning-rate 0.001
curves draft draft/first
curves draft-b draft/second
ship draft-c draft

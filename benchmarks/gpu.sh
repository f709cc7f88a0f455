#!/usr/bin/env bash
# The probe and the comparisons on one GPU, offline, from a folder with a model, in 8 minutes at most.
#
#   benchmarks/gpu.sh MODEL_FOLDER OUTPUT_FOLDER
#
# The first python in the path must have `pip install -e '.[bench]'`; PYTHON names another one.
# OUTPUT_FOLDER gets probe.json, evaluation.json, training.json, results.json and performance.md.
# DEVICE=cpu and ROUNDS=1 try it without a GPU.
set -euo pipefail

if [ $# -ne 2 ] || [ ! -f "$1/config.json" ]; then
    echo "usage: benchmarks/gpu.sh MODEL_FOLDER OUTPUT_FOLDER (the first with a config.json)" >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
model=$1
output=$2
python=${PYTHON:-python}
device=${DEVICE:-cuda}
rounds=${ROUNDS:-5}
limit=480
mkdir -p "$output"
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1

run() {
    local left=$((limit - SECONDS))
    if [ "$left" -le 0 ]; then
        echo "gpu.sh: no time left for $1: $limit s are over" >&2
        exit 1
    fi
    echo "gpu.sh: $1, $left s left" >&2
    timeout --kill-after=10 "$left" "$python" "$here/$1.py" --model "$model" --device "$device" \
        --rounds "$rounds" --output "$output/$2.json" >"$output/$2.log" 2>&1 || {
        tail -n 20 "$output/$2.log" >&2
        echo "gpu.sh: $1 failed or ran out of time; all it said: $output/$2.log" >&2
        exit 1
    }
}

run probe probe
run evaluation_speed evaluation
run training_speed training
"$python" "$here/performance.py" --gather "$output" \
    --results "$output/results.json" --page "$output/performance.md"
echo "gpu.sh: done in $SECONDS s: $output/performance.md"

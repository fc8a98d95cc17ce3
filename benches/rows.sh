#!/usr/bin/env bash
# Trains rows of the accuracy table one after another, for SECONDS in total: rows.sh OUT TRAINER DATA SECONDS MODEL…
#
# Trains each model's configs/cifar_MODEL.toml with $TRAIN (default: --gpus 1 --set train.precision=bf16) on the data in DATA.
# A run that reaches the time limit saves a checkpoint in OUT/runs. The next call with the same OUT resumes the run, and
# skips finished ones. Summaries of finished runs, to be committed, are in OUT/results; their table is printed last.
set -uo pipefail
[ $# -ge 5 ] || { sed -n 2,6p "$0" >&2; exit 2; }
out=$1 trainer=$2 data=$3 seconds=$4
shift 4
configs=$(cd "$(dirname "$0")/../configs" && pwd)
read -ra train <<<"${TRAIN:---gpus 1 --set train.precision=bf16}"
# Reads a number of a run's summary, without its decimals.
number() { sed -n "s/^  \"$1\": \([0-9]*\).*/\1/p" "$2"; }
# Seconds for starting, evaluating and saving.
reserve=30
failed=0
mkdir -p "$out/runs" "$out/results" "$out/logs"
for model in "$@"; do
    left=$((seconds - SECONDS - reserve))
    limit=$left
    [ $left -gt 0 ] || { echo "$model: no time left"; continue; }
    kept=$(ls -d "$out"/results/*-"$model"-* 2>/dev/null | tail -1)
    [ -z "$kept" ] || { echo "$model: $(basename "$kept") is finished"; continue; }
    unfinished=$(ls -d "$out"/runs/*-"$model"-* 2>/dev/null | tail -1)
    if [ -n "$unfinished" ]; then
        what=(--resume "$unfinished")
        # The limit applies to the sum over all parts of a run.
        limit=$((left + $(number seconds "$unfinished/summary.json")))
    else
        what=(--config "$configs/cifar_$model.toml" --run-dir "$out/runs" "${train[@]}")
    fi
    echo "== $model, $left s"
    "$trainer" "${what[@]}" --data-dir "$data" --set train.max_time_s=$limit >>"$out/logs/$model.log" 2>&1
    code=$?
    run=$(ls -d "$out"/runs/*-"$model"-* 2>/dev/null | tail -1)
    tail -n 12 "$out/logs/$model.log"
    if [ $code -ne 0 ]; then
        echo "$model: exit code $code, $out/logs/$model.log"
        failed=1
    elif [ "$(number epochs "$run/summary.json")" = "$(number planned_epochs "$run/summary.json")" ]; then
        "$trainer" table "$run" --save "$out/results" >>"$out/logs/$model.log" 2>&1 || failed=1
    fi
done
[ -z "$(ls "$out/results")" ] || "$trainer" table "$out/results"
exit $failed

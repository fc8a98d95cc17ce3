#!/usr/bin/env bash
# Trains rows of the accuracy table one after another, for so many seconds: rows.sh OUT TRAINER DATA SECONDS MODEL…
#
# Each model's configs/cifar_MODEL.toml is trained with $TRAIN (default: --gpus 1 --set train.precision=bf16) on the data in
# DATA. A run that time ends saves a checkpoint in OUT/runs; the next call with the same OUT goes on with it, and leaves out
# what is finished. What is finished is in OUT/results too, small, to be committed; the table of it is printed last.
set -uo pipefail
[ $# -ge 5 ] || { sed -n 2,6p "$0" >&2; exit 2; }
out=$1 trainer=$2 data=$3 seconds=$4
shift 4
configs=$(cd "$(dirname "$0")/../configs" && pwd)
read -ra train <<<"${TRAIN:---gpus 1 --set train.precision=bf16}"
# of a run's summary, without what is behind the point
number() { sed -n "s/^  \"$1\": \([0-9]*\).*/\1/p" "$2"; }
# saving, evaluating and what a start costs
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
        # the limit is on the time of all of a run's parts
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

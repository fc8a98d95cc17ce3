# Functions of graph.sh and ddp_graph.sh, which source this file: runs of the trainer and comparisons of their checkpoints.
#
# The variables trainer, out and calls (the stand-in's log, or empty) must be set.

run() { # NAME GPUS ARGUMENT…: a run in OUT/NAME, whose messages are in OUT/NAME.txt and whose calls in OUT/NAME.calls
    local name=$1 gpus=$2
    shift 2
    [ -z "$calls" ] || : >"$calls"
    "$trainer" --gpus "$gpus" --run-dir "$out/$name" "$@" >"$out/$name.txt" 2>&1 || { tail -n 20 "$out/$name.txt"; exit 1; }
    ! grep "not as a CUDA graph" "$out/$name.txt" || exit 1
    [ -z "$calls" ] || cp "$calls" "$out/$name.calls"
}

same() { # RUN RUN: compares weights, optimizer state, statistics and weight average
    local file files=("$1"/checkpoints/last/*.safetensors)
    [ ${#files[@]} -ge 2 ]
    for file in "${files[@]}"; do cmp "$file" "$2/checkpoints/last/$(basename "$file")"; done
}

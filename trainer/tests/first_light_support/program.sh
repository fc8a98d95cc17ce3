#!/usr/bin/env bash
# Stands for every program of first_light.sh; the name of the file says for which. The call is appended to the file CALLS.
# FAIL, HANG and HANG_ONCE are regular expressions for calls that fail, never end, and end when they are called once more.
said="${0##*/} $*"
echo "$said" >>"$CALLS"
matches() { [ -n "$1" ] && [[ $said =~ $1 ]]; }
value() { sed "s/.*$1 \([^ ]*\).*/\1/" <<<"$said"; }
if matches "${FAIL:-}"; then echo "a note"; echo "error: broken on purpose"; exit 1; fi
if matches "${HANG:-}"; then exec sleep 1000; fi
if matches "${HANG_ONCE:-}" && ! [ -e "$CALLS.hung" ]; then touch "$CALLS.hung"; exec sleep 1000; fi
case $said in
"trainer models") printf '%s  family\n' name lenet resnet18 mobilenetv2 regnetx_200mf densenet121 shufflenetv2_x0_5 ;;
"trainer doctor --json")
    gpu='{"index": 0, "name": "NVIDIA H200", "compute": [9, 0], "memory_check": "works"}'
    echo '{"features": ['"${FEATURES-\"cuda\"}"'], "driver": {"cuda": "13.0", "version": "580.1"}, "gpus": ['"${GPUS-$gpu}"'],
        "nvrtc": {"version": "13.0"}, "versions": null, "compiler": "works", "ipc": "works", "visible": null,
        "would_use": {"device": "GPU", "why": "", "gradients": "cuda: one GPU"}}' ;;
"trainer data"* | "trainer bench"* | "trainer compare"*) ;;
*train.epochs=10000*)
    sleep 1000 &
    sleep 1000 &
    mkdir "$(value --run-dir)/1" && printf '{}\n{}\n{}\n' >"$(value --run-dir)/1/metrics.jsonl"
    wait -n
    echo "rank 1 was killed by SIGKILL (signal 9)"
    kill %1 %2
    exit "${KILLED_CODE:-3}" ;;
trainer*)
    mkdir "$(value --run-dir)/1"
    # Without RANDOM_LOSS every run has the same losses.
    echo "{\"loss\": 0.5${RANDOM_LOSS:+$(wc -l <"$CALLS")}}" >"$(value --run-dir)/1/metrics.jsonl"
    echo '{"seconds": 1.5, "images_per_s": 1000, "steps": 7, "last": {"top1": '"${TOP1_REACHED:-90}"'}}' >"$(value --run-dir)/1/summary.json" ;;
gpu_check*) echo "gpu_check: all checks passed" ;;
step*) echo '[{"ours": {"step": 2.0}, "first_step_s": 1, "peak_bytes": 1073741824, "device": "GPU"}]' >"$(value --json)" ;;
"python"*--available*) [ -z "${NO_TORCH:-}" ] || { echo "no PyTorch: No module named 'torch'"; exit 1; } ;;
python*) echo '{"best": {"step": 3.0, "first_step_s": 9, "peak_bytes": 2147483648}}' ;;
compute-sanitizer*) echo "ERROR SUMMARY: 0 errors" ;;
esac

#!/usr/bin/env bash
# The first ten minutes with a new GPU machine, and the half hour after them: first_light.sh OUT
#
# Checks the GPUs, times training steps beside PyTorch's, trains, and prints one table. A call ends within LIMIT seconds. Exit code
# 75: call it again with the same OUT, and it continues. 0: all is done and passed; 1: all is done and something failed; 2: bad
# input. A failed step does not stop the others. A step that takes too long is tried once more with twice the time.
# OUT receives results.jsonl, table.txt, and one log per group of steps; OUT/work is removed when all steps have passed.
#
#   TRAINER, GPU_CHECK, STEP  the programs (default: target/release/trainer, gpu_check, and the newest deps/step-*)
#   DATA             the folder with CIFAR-10 (default: TRAINER_DATA_DIR, then ~/.cache/trainer)
#   PYTHON           a Python with PyTorch, which may be missing (default: python3)
#   LIMIT            seconds of a call (default: 540)
#   ONLY             groups to run, of "checks training times epochs more" (default: all)
#   AGAIN            steps to repeat, or "failed" for all that did not pass
#   WORK, CACHE      the folders of runs (default: OUT/work) and of compiled kernels (default: WORK/cache)
#   NETWORKS, BATCHES, STEPS        what is timed (default: "resnet18 mobilenetv2 regnetx_200mf densenet121", 128, 20)
#   STEP_LIMIT       seconds of each step's first attempt (default: each step's own)
# To run the whole script where everything is slow:
#   NETWORK, COMPARED         the network of the short runs (default: resnet18), and those that are compared with the CPU
#   SETTINGS, TOP1            KEY=VALUE of each run, the accuracy that the quickstart must reach (default: 82)
#   EPOCH_CONFIG              the run of one epoch (default: configs/cifar_resnet18.toml)
#   SIZES, RANKS, TRAIN       elements and ranks of the collectives, ranks of the losses
#   OPS                       more flags of `gpu_check --ops`
#   PEER_DEVICE=cpu           PyTorch on the CPU
set -uo pipefail

usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$0" >&2; exit 2; }
die() { echo "error: first_light.sh: $1" >&2; echo "hint: $2" >&2; exit 2; }
[ $# -eq 1 ] && [ -n "$1" ] && [ "${1#-}" = "$1" ] || usage
# Seconds between the signal that ends a step and the one that kills it.
grace=10
here=$(cd "$(dirname "$0")" && pwd)
root=$(dirname "$here")
release=${CARGO_TARGET_DIR:-$root/target}/release
build="build it with: cargo build --release --features cuda -p trainer -p benches --bins --bench step"

# --- Input ------------------------------------------------------------------------------------------------------------------

# The interpreter itself: `python3` may be a script that looks for it at each start.
python3=$(python3 -c 'import sys; print(sys.executable)' 2>/dev/null) ||
    die "python3 is missing" "install Python 3; its standard library is enough"
number() { # VARIABLE VALUE LOWEST EXAMPLE
    [[ $2 =~ ^(0|[1-9][0-9]{0,8})$ ]] && [ "$2" -ge "$3" ] || die "$1=$2 is not a whole number of at least $3" "e.g. $1=$4"
}
program() { # VARIABLE PATH HINT
    [ -f "$2" ] && [ -x "$2" ] || die "$2 is not a program" "$3, or set $1"
    realpath -s "$2"
}
limit=${LIMIT:-540} steps=${STEPS:-20} top1=${TOP1:-82}
number LIMIT "$limit" $((grace + 10)) 540
number STEPS "$steps" 1 20
number TOP1 "$top1" 0 82
[ -z "${STEP_LIMIT:-}" ] || number STEP_LIMIT "$STEP_LIMIT" 1 60
read -ra networks <<<"${NETWORKS:-resnet18 mobilenetv2 regnetx_200mf densenet121}"
read -ra batches <<<"${BATCHES:-128}"
read -ra settings <<<"${SETTINGS:-}"
flags=()
for setting in "${settings[@]}"; do flags+=(--set "$setting"); done
for batch in "${batches[@]}"; do number BATCHES "$batch" 1 "128 512"; done
read -ra compared <<<"${COMPARED:-lenet resnet18 shufflenetv2_x0_5 regnetx_200mf}"
network=${NETWORK:-resnet18}
groups=(checks training times epochs more)
read -ra only <<<"${ONLY:-${groups[*]}}"
read -ra again <<<"${AGAIN:-}"
for list in networks batches compared only; do
    declare -n words=$list
    [ ${#words[@]} -gt 0 ] || die "${list^^} is empty" "unset it for the default"
done
for group in "${only[@]}"; do
    [[ " ${groups[*]} " = *" $group "* ]] || die "ONLY=$ONLY: there is no group $group" "the groups are: ${groups[*]}"
done
trainer=$(program TRAINER "${TRAINER:-$release/trainer}" "$build") || exit 2
check=$(program GPU_CHECK "${GPU_CHECK:-$release/gpu_check}" "$build") || exit 2
# `ls -t`: the newest of several builds. The name ends in a hash.
newest=$(ls -t "$release"/deps/step-* 2>/dev/null | grep -v '\.d$' | head -1)
bench=$(program STEP "${STEP:-${newest:-$release/deps/step-*}}" "$build") || exit 2
epoch_config=${EPOCH_CONFIG:-$root/configs/cifar_resnet18.toml}
[ -f "$epoch_config" ] || die "EPOCH_CONFIG=$epoch_config is not a file" "e.g. EPOCH_CONFIG=configs/cifar_resnet18.toml"
names=$("$trainer" models 2>/dev/null | cut -d ' ' -f 1)
[ -n "$names" ] || die "$trainer models prints nothing" "is $trainer the program of this project, built for this machine?"
for name in "$network" "${networks[@]}" "${compared[@]}"; do
    grep -qxF -- "$name" <<<"$names" || die "there is no network $name" "$trainer models lists them"
done
data=${DATA:-${TRAINER_DATA_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/trainer}}
python=${PYTHON:-python3}

mkdir -p "$1" 2>/dev/null && [ -w "$1" ] || die "the folder $1 cannot be written" "name a folder of your own, e.g. ~/first-light"
out=$(realpath "$1")
work=${WORK:-$out/work}
mkdir -p "$work/run" 2>/dev/null || die "the folder $work cannot be written" "set WORK to a folder of your own"
work=$(realpath "$work")
cache=${CACHE:-$work/cache}
mkdir -p "$cache" 2>/dev/null || die "the folder $cache cannot be written" "set CACHE to a folder of your own"

# --- Machine ----------------------------------------------------------------------------------------------------------------

# The machine's toolkit, and no newer NVRTC: see docs/gpus.md.
if [ -z "${CUDA_PATH:-}" ] && [ -d /usr/local/cuda ]; then export CUDA_PATH=/usr/local/cuda; fi
if ls "${CUDA_PATH:-/nonexistent}"/lib64/libnvrtc.so* >/dev/null 2>&1; then
    export LD_LIBRARY_PATH=$CUDA_PATH/lib64${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
fi
cold=cold
[ -z "$(ls -A "$cache/cubecl" 2>/dev/null)" ] || cold=warm
export XDG_CACHE_HOME=$cache TORCHINDUCTOR_CACHE_DIR=$work/inductor TRITON_CACHE_DIR=$work/triton NO_COLOR=1
results() { # COMMAND [ARGUMENT…]
    local command=$1
    shift
    PYTHONUTF8=1 "$python3" -B "$here/first_light/results.py" "$command" "$out/results.jsonl" "$@"
}
# The lock belongs to descriptor 9 and ends with this process.
exec 9>>"$out/results.jsonl" || die "$out/results.jsonl cannot be written" "name a folder of your own, e.g. ~/first-light"
known=$(results begin "${again[@]}") || exit 2
declare -A attempts state
while read -r name tries what; do [ -z "$name" ] || attempts[$name]=$tries state[$name]=$what; done <<<"$known"
gpus=${state[gpus]:-}
if [ -z "$gpus" ]; then
    timeout --kill-after=$grace 60 "$trainer" doctor --json >"$work/doctor.json" 2>/dev/null 9>&- </dev/null
    # A doctor that fails is a result of this script. A machine without a GPU is a mistake.
    found=$(results gpus "$work/doctor.json") || exit 2
    gpus=${found:-1}
fi
# Ranks that share a GPU share the first one.
one=(env CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}")
one=("${one[@]%%,*}")
[ "$gpus" -le 8 ] || gpus=8
if [ "$gpus" -gt 1 ]; then several=(--gpus "$gpus"); else several=(--gpus 2 --oversubscribe); fi

# --- Steps ------------------------------------------------------------------------------------------------------------------

plan=() left=0 ran=0 full='' child='' signal=''
stop() { signal=$1 full=yes; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null; }
trap 'stop 130' INT
trap 'stop 143' TERM HUP
wanted() { [[ " ${only[*]} " = *" $1 "* ]]; }
pending() { wanted "$1" && [ -z "${state[$2]:-}" ] && [ -z "$full" ]; } # GROUP NAME: the next `step` would run it
# Records that a step cannot run here. The next call looks again.
skip() { # GROUP NAME KIND REASON
    wanted "$1" || return 0
    plan+=("$1 $2 $3")
    [ -n "${state[$2]:-}" ] || results skip "$2" "$1" "$4" || exit 2
}
# Runs a step unless it has a result, and once more if it takes too long. KIND says where its figures are: results.py.
step() { # GROUP NAME KIND SECONDS COMMAND…
    wanted "$1" || return 0
    plan+=("$1 $2 $3")
    until [ -n "${state[$2]:-}" ] || [ -n "$full" ]; do attempt "$@"; done
    [ -n "${state[$2]:-}" ] || left=$((left + 1))
}
# Runs a step once, or notes that this call has no time for it.
attempt() { # GROUP NAME KIND SECONDS COMMAND…
    local group=$1 name=$2 kind=$3 seconds=${STEP_LIMIT:-$4} log=$out/$1.log remaining offset begun code
    shift 4
    seconds=$((seconds * (${attempts[$name]:-0} + 1)))
    remaining=$((limit - SECONDS - grace - 5))
    # The first step of a call always runs, in the time that a call has. The others wait for a call that has time for them.
    if [ $seconds -gt $remaining ]; then
        if [ $ran -gt 0 ]; then full=yes; return; fi
        seconds=$((remaining > 1 ? remaining : 1))
    fi
    ran=$((ran + 1))
    attempts[$name]=$((${attempts[$name]:-0} + 1))
    rm -rf "$work/run" "$work/step.json" && mkdir -p "$work/run"
    # If this script is killed, the next call knows.
    printf '{"step": "%s", "group": "%s", "state": "started", "limit": %d}\n' "$name" "$group" "$seconds" >>"$out/results.jsonl" ||
        die "$out/results.jsonl cannot be written" "free some space; the next call continues"
    echo "== $name, at most $seconds s: $*" >>"$log"
    offset=$(stat -c %s "$log")
    echo "$name" >&2
    begun=$SECONDS
    # `timeout` makes a process group and ends all of it.
    timeout --kill-after=$grace "$seconds" "$@" >>"$log" 2>&1 </dev/null 9>&- &
    child=$!
    # bash reports a killed child on stderr.
    { until wait "$child"; code=$?; ! kill -0 "$child"; do :; done; } 2>/dev/null
    child=''
    [ -z "$signal" ] || kind=stopped
    # Nothing is printed for an attempt that another one follows.
    state[$name]=$(results end "$name" "$group" "$kind" "$code" "$((SECONDS - begun))" "$seconds" "$log" "$offset" "$work") ||
        exit 2
    echo >>"$log"
}
. "$here/first_light/plan.sh"

# --- Table ------------------------------------------------------------------------------------------------------------------

printf '%s\n' "${plan[@]}" | results table >"$out/table.txt" || exit 2
cat "$out/table.txt"
[ -z "$signal" ] || exit "$signal"
[ "$left" -eq 0 ] || exit 75
# What failed can be repeated with the kernels that are there.
grep -q '^[0-9]* passed, 0 failed' "$out/table.txt" || exit 1
[ -n "${WORK:-}" ] || rm -rf "$work"

#!/usr/bin/env bash
# Runs the checks that are possible without a GPU, first_light.sh among them: the CUDA build on the stand-in for NVIDIA's driver and
# NCCL (trainer/testing/cuda-on-cpu): on_cpu.sh PYTHON [OUT]
#
# PYTHON must have the packages that trainer/testing/cuda-on-cpu/run.sh names. The programs are built here with --features
# cuda. cubecl's build script downloads LLVM, which is linked but not used. Without internet access set
#   DOCS_RS=1 RUSTFLAGS="-C link-arg=-Wl,--unresolved-symbols=ignore-all"
# FEATURES: the build's features (default: cuda). With cuda,comm/mpi,trainer/mpi, the tests of the backend over MPI run too.
# The first run takes ten minutes: it compiles and tunes kernels, which are kept. Times mean nothing.
set -uo pipefail
python=${1:?usage: on_cpu.sh PYTHON [OUT]}
out=${2:-$(mktemp -d)}
mkdir -p "$out"
out=$(realpath "$out")
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
features=${FEATURES:-cuda}
# One build: another selection of targets would give dependencies other features, and compile burn again.
tests=$(cargo build --profile stand-in --features "$features" -p trainer -p comm -p launch -p benches -p cuda-on-cpu --bins --lib \
    --examples --bench step --test mpi --message-format json-render-diagnostics | "$python" -c '
import json, sys
for built in map(json.loads, sys.stdin):
    if built.get("executable") and built["target"]["kind"] == ["test"]:
        print(built["manifest_path"], built["executable"])') || exit 2
programs=${CARGO_TARGET_DIR:-$root/target}/stand-in
export CUDA_ON_CPU_LIBRARY=$programs/libcuda_on_cpu.so
# cubecl measures the throughput of the memory before it tunes kernels, with buffers that grow with the memory (up to a quarter of
# it).
export CUDA_ON_CPU_MEMORY=${CUDA_ON_CPU_MEMORY:-$((1 << 28))}
# Define the symbols that the linker ignored: nobody calls these functions, but the loader needs them.
bench=$(ls -t "$programs"/deps/step-* | grep -v '\.d$' | head -1)
defined=$(ldd "$programs/trainer" | awk '$3 ~ /^\// { print $3 }' | xargs nm -D --defined-only | awk 'NF == 3 { print $3 }' | sort -u)
missing=$(nm -D --undefined-only "$programs/trainer" "$programs/gpu_check" "$bench" | awk '$1 == "U" && $2 !~ /@/ { print $2 }' |
    sort -u | comm -23 - <(echo "$defined"))
if [ -n "$missing" ]; then
    while read -r name; do echo "void $name(void) { __builtin_trap(); }"; done <<<"$missing" |
        "${CC:-cc}" -shared -fPIC -w -x c - -o "$out/missing.so" || exit 2
    preload="LD_PRELOAD=$(realpath "$out")/missing.so"
fi
failed=()
fail() { # NAME WHY
    echo "$1: FAILED, $2"
    failed+=("$1: $2")
}
step() { # NAME GPUS COMMAND…; without GPUs there is no stand-in either
    local name=$1 gpus=$2 on=(trainer/testing/cuda-on-cpu/run.sh "$python") TIMEFORMAT='(%0R s, %0U s of CPU)'
    shift 2
    [ "$gpus" != 0 ] || on=()
    echo "== $name"
    if time CUDA_ON_CPU_GPUS=$gpus timeout 5700 "${on[@]}" env ${preload:+"$preload"} "$@" >"$out/$name.log" 2>&1; then
        tail -n 8 "$out/$name.log"
    else
        fail "$name" "status $?, $out/$name.log ends with:"
        tail -n 40 "$out/$name.log"
    fi
}
step doctor 2 "$programs/trainer" doctor
# first_light.sh with small runs, whose shapes are those of the other steps: other groups would tune more shapes for minutes. It runs
# beside the other steps, most of which use one core. Its first long step is `gpu_check --ops`, whose deferred batch norms run beside
# it.
small=(OPS="--cases single --random 4 --alternate" NETWORK=lenet NETWORKS=lenet COMPARED=lenet BATCHES=32 STEPS=2 TOP1=0 RANKS=2
    SIZES=1,4100 TRAIN=1 PEER_DEVICE=cpu
    EPOCH_CONFIG=configs/quickstart.toml LIMIT=5400 STEP_LIMIT=3000
    TRAINER="$programs/trainer" GPU_CHECK="$programs/gpu_check" STEP="$bench"
    SETTINGS="train.epochs=1 train.batch_scope=per_worker train.batch_size=32 data.limit_train=64 data.limit_test=64")
first_light() {
    step first-light 1 env "${small[@]}" ONLY="checks training" PYTHON="$python" \
        bash -c 'CACHE=$XDG_CACHE_HOME exec benches/first_light.sh "$1"' - "$out/first-light"
    cat "$out/first-light/table.txt"
    [ ${#failed[@]} = 0 ]
}
first_light >"$out/first-light.txt" 2>&1 &
first_light=$!
deferred() { step deferred 1 "$programs/gpu_check" --ops --cases deferred --alternate --ranks 1; [ ${#failed[@]} = 0 ]; }
deferred >"$out/deferred.txt" 2>&1 &
deferred=$!
case $features in *mpi*)
    while read -r manifest test; do
        step "mpi-$(basename "$(dirname "$manifest")")" 0 env -C "$(dirname "$manifest")" "$test" </dev/null
    done <<<"$tests" ;;
esac
# Without TF32's rounding, whole networks are as near to the CPU as f32 is.
CUDA_ON_CPU_TF32=exact step exact 1 "$programs/gpu_check" --networks lenet --near 1e-5 --ranks 1
# Two ranks: in first_light.sh, where they share a GPU, and long arrays in the step `strict`.
step matrix 3 "$programs/gpu_check" --ranks 3 --sizes 1023,70001 --rounds 1
# Sums over NCCL follow each other without a wait of the host.
rm -f "$out"/*.calls
CUDA_ON_CPU_LOG=$out/nccl.calls step nccl 3 "$programs/trainer" bench allreduce --gpus 3 --backend nccl --sizes 4,70000 --ms 100
queued=$(awk '/ncclAllReduce\(/ { if (++sums[$1] > most) most = sums[$1] }
    /cu(Stream|Ctx|Event)(Synchronize|Query)\(/ { sums[$1] = 0 } END { print most + 0 }' "$out/nccl.calls")
[ "$queued" -gt 1 ] || fail nccl "the host waits after each of NCCL's sums"
# It waits for half a minute.
stuck() {
    CUDA_ON_CPU_NCCL=stuck step stuck 2 bash -c '! "$@"' fails "$programs/trainer" bench allreduce --gpus 2 --backend nccl \
        --sizes 4 --ms 10
    [ ${#failed[@]} = 0 ]
}
stuck >"$out/stuck.txt" 2>&1 &
stuck=$!
# Every call that may wait for the GPU does: the ranks must not wait for each other in a circle.
CUDA_ON_CPU_WAITS=all step strict 2 "$programs/gpu_check" --ranks 2 --sizes 1,70001 --rounds 1
# In one process first: two would compile and tune the same kernels at the same time.
step resume 1 benches/gpu_check/resume.sh "$programs/trainer" "$out/resume"
# Blocks in another order in each launch: the last block of a reduction is another one, and the bits are the same.
CUDA_ON_CPU_SHUFFLE=5 CUDA_ON_CPU_LOG=$out/graph.calls EPOCHS=2 IMAGES=116 step graph 1 benches/gpu_check/graph.sh \
    "$programs/trainer" "$out/graph" "$out/graph.calls"
CUDA_ON_CPU_SHUFFLE=5 CUDA_ON_CPU_LOG=$out/ddp-graph.calls EPOCHS=2 IMAGES=116 step ddp-graph 3 benches/gpu_check/ddp_graph.sh \
    "$programs/trainer" "$out/ddp-graph" "$out/ddp-graph.calls"
step training 2 "$programs/gpu_check" --ranks 1 --trainer "$programs/trainer" --train 2 --steps 4
# Blocks in another order on each rank too: the ranks clip by the same norm.
CUDA_ON_CPU_WAITS=all CUDA_ON_CPU_SHUFFLE=7 step strict-training 2 "$programs/trainer" --config configs/quickstart.toml --gpus 2 \
    --run-dir "$out/runs" --epochs 1 --set train.batch_size=64 --set data.limit_train=256 --set data.limit_test=64 \
    --set parallel.bucket_mb=0.05 --set train.grad_clip=0.01 --set parallel.check_sync_every=1
CUDA_ON_CPU_NCCL=dev CUDA_ON_CPU_LOG=$out/compare.calls step compare 2 "$programs/trainer" compare \
    --config configs/quickstart.toml --gpus 2 --steps 4 --rounds 1 --out "$out/compare" --modes dp,ddp
# `auto` where GPUs cannot access each other's memory. Without the stand-in's own name, kernels are kept by model and versions.
CUBECL_ENVIRONMENT='' CUDA_ON_CPU_PEERS=lies step to-nccl 2 "$programs/trainer" bench allreduce --gpus 2 --sizes 4 --ms 10
CUDA_ON_CPU_IPC=refused CUDA_ON_CPU_NCCL=no step to-host 2 "$programs/trainer" --config configs/quickstart.toml --gpus 2 \
    --run-dir "$out/runs" --epochs 1 --set train.batch_size=64 --set data.limit_train=128 --set data.limit_test=64
# A kernel's error, after which the GPU does not answer any more. The kernel is named with a timeline too.
CUDA_ON_CPU_FAULT=sgd:700 CUDA_LAUNCH_BLOCKING=1 step fault 1 bash -c '! "$@"' fails "$programs/trainer" \
    --config configs/quickstart.toml --gpus 1 --run-dir "$out/runs" --epochs 1 --set train.batch_size=32 \
    --set data.limit_train=64 --set data.limit_test=64 --set log.timeline=true
# Kernels of convolutions are compiled ahead, for a virtual architecture, and no kernel is compiled twice.
CUDA_ON_CPU_RUN=no CUDA_ON_CPU_LOG=$out/ahead.calls step ahead 1 env XDG_CACHE_HOME="$out/ahead" "$programs/trainer" \
    --config configs/quickstart.toml --gpus 1 --run-dir "$out/runs" --set train.max_steps=1 --set data.limit_train=64 \
    --set data.limit_test=64
# A folder that cannot keep kernels. The note comes first; compiling every kernel would take half an hour, so the run ends there.
step no-cache 1 bash -c 'exec 3< <(timeout -k 1 300 "$@" 2>&1); grep -m 1 "note: compiled kernels" <&3; found=$?; kill $!; exit $found' \
    until-note env XDG_CACHE_HOME=/dev/null CUBECL_ENVIRONMENT= "$programs/trainer" --config configs/quickstart.toml --gpus 1 \
    --dry-run
wait $stuck || fail stuck "its output is below"
wait $deferred || fail deferred "its output is below"
wait $first_light || fail first-light "its output is below"
cat "$out/stuck.txt" "$out/deferred.txt" "$out/first-light.txt"
expect() { # NAME TEXT
    grep -q "$2" "$out/$1.log" || fail "$1" "$out/$1.log has no \"$2\""
}
expect to-nccl "NCCL over 2 GPUs, as rank .'s GPU does not read what was written"
expect to-host "gradients: through the host's memory, as GPU .: cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED"
expect fault "note: log.timeline: kernels are left out"
expect fault "error: the GPU has stopped after an access to memory that is not the process's in the kernel Sgd"
expect stuck "ncclCommInitRank did not connect 2 ranks within"
expect no-cache "note: compiled kernels cannot be kept"
compiled=$(grep -c nvrtcCompileProgram "$out/ahead.calls") ahead=$(grep -c 'nvrtcCompileProgram.*=compute_' "$out/ahead.calls")
loaded=$(grep -c cuModuleLoadData "$out/ahead.calls")
echo "ahead: $compiled kernels were compiled, $ahead of them ahead of their launch, and $loaded were loaded"
[ "$compiled" = "$loaded" ] && [ "$ahead" -gt 0 ] || fail ahead "kernels were not compiled ahead, or twice"
# Mode dp moves tensors through the host even where cubecl would send them by NCCL.
! grep -q ncclCommInitRank "$out/compare.calls" || fail compare "a tensor went from one GPU to another by NCCL"
ls "$programs/../cuda-on-cpu/cache/cubecl" | grep -q "^CPU-as-GPU-A-sm80_CPU-as-GPU-B-sm80-nvrtc[0-9.]*-driver[0-9.]*" ||
    fail cache "no kernels are kept for the two GPUs"
if unshare --pid --fork --mount-proc true 2>/dev/null; then
    # As many images per GPU as above, so that nothing is tuned again.
    step hosts 4 benches/gpu_check/two_hosts.sh "$programs/trainer" "$out" --epochs 1 --set train.batch_size=128 \
        --set data.limit_train=512 --set data.limit_test=128
    grep -h "^gradients:" "$out/hosts.log"
else
    echo "hosts: skipped, this user may not create a PID namespace"
fi
[ ${#failed[@]} != 0 ] || { echo "on_cpu.sh: all passed; logs in $out"; exit 0; }
# The causes once more, as thousands of lines may be above.
for what in "${failed[@]}"; do
    echo "== $what"
    log=$out/${what%%:*}.log
    [ ! -e "$log" ] || grep -m 3 -A 4 -E "panicked at|^error|FAILED" "$log" || tail -n 8 "$log"
done
echo "on_cpu.sh: FAILED; logs in $out"
exit 1

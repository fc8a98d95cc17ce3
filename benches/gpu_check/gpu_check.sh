#!/usr/bin/env bash
# Runs all checks that need a GPU, in about ten minutes: gpu_check.sh OUT [TRAINER GPU_CHECK]
# OUT receives the logs. TRAINER and GPU_CHECK are the two programs; by default they are built here with --features cuda. One
# GPU is enough: ranks then share it, and times mean nothing. compute-sanitizer is used if it is installed.
set -uo pipefail
out=${1:?usage: gpu_check.sh OUT [TRAINER GPU_CHECK]}
mkdir -p "$out"
root=$(cd "$(dirname "$0")/../.." && pwd)
if [ $# -ge 3 ]; then
    trainer=$2 check=$3
else
    (cd "$root" && cargo build --release --features cuda -p trainer -p benches --bins) || exit 2
    target=${CARGO_TARGET_DIR:-$root/target}/release
    trainer=$target/trainer check=$target/gpu_check
fi
failed=0
step() { # NAME SECONDS COMMAND…
    local name=$1 limit=$2
    shift 2
    echo "== $name"
    if timeout "$limit" "$@" >"$out/$name.log" 2>&1; then
        tail -n 3 "$out/$name.log"
    else
        echo "$name: FAILED ($?), $out/$name.log ends with:"
        tail -n 25 "$out/$name.log"
        failed=1
    fi
}
nvidia-smi >"$out/nvidia-smi.log" 2>&1
"$trainer" doctor >"$out/doctor.log" 2>&1
step ops 100 "$check" --ops --ranks 1
step networks 200 "$check" --networks lenet,resnet18,shufflenetv2_x0_5,regnetx_200mf --ranks 1
step matrix 200 "$check" --ranks 2,4
step training 200 "$check" --ranks 1 --trainer "$trainer"
step allreduce 60 "$trainer" bench allreduce --gpus 2 --oversubscribe --sizes 4,65536,44695848 --ms 200
step compare 100 "$trainer" compare --config "$root/configs/quickstart.toml" --gpus 2 --oversubscribe --steps 10 --rounds 1 \
    --out "$out/compare"
if command -v compute-sanitizer >/dev/null; then
    for tool in memcheck racecheck initcheck; do
        # Few and small cases, because the sanitizer is slow. Every rank is a separate process.
        step "sanitizer-$tool" 60 compute-sanitizer --tool "$tool" --target-processes all --error-exitcode 86 \
            "$check" --ranks 2 --sizes 1,1023,4100 --rounds 1
    done
else
    echo "compute-sanitizer: skipped, not found" | tee "$out/sanitizer.log"
fi
[ $failed = 0 ] && echo "gpu_check.sh: all passed; logs in $out" || echo "gpu_check.sh: FAILED; logs in $out"
exit $failed

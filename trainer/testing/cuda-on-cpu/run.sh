#!/usr/bin/env bash
# Runs a program of a CUDA build on the stand-in for NVIDIA's driver: run.sh PYTHON COMMAND…
#
# PYTHON is one that has NVIDIA's compiler and its headers: pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt
# nvidia-cuda-cccl. The stand-in is built here (cargo build --release -p cuda-on-cpu) if it is not there; src/lib.rs says
# which variables it knows, CUDA_ON_CPU_GPUS first of all. Kernels are kept in target/cuda-on-cpu, apart from real GPUs'.
set -euo pipefail
python=${1:?usage: run.sh PYTHON COMMAND…}
shift
root=$(cd "$(dirname "$0")/../../.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
library=$target/release/libcuda_on_cpu.so
[ -e "$library" ] || (cd "$root" && cargo build --release -p cuda-on-cpu)
toolkit=$("$python" -c '
import glob, sys
found = [p for root in sys.path for p in glob.glob(f"{root}/nvidia/cu*") if glob.glob(f"{p}/lib/libnvrtc.so.*")]
print(found[0] if found else "")')
[ -n "$toolkit" ] || { echo "run.sh: $python has no package nvidia-cuda-nvrtc" >&2; exit 2; }
for header in cuda_fp16.h crt/mma.h cccl/cuda/barrier; do
    [ -e "$toolkit/include/$header" ] || { echo "run.sh: $toolkit/include has no $header; pip install nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl" >&2; exit 2; }
done
kept=$target/cuda-on-cpu
mkdir -p "$kept/lib" "$kept/modules" "$kept/cache"
ln -sf "$(realpath "$library")" "$kept/lib/libcuda.so.1"
ln -sf libcuda.so.1 "$kept/lib/libcuda.so"
ln -sf "$(realpath "$library")" "$kept/lib/libnccl.so.2"
ln -sf "$(ls "$toolkit"/lib/libnvrtc.so.* | head -1)" "$kept/lib/libnvrtc.so"
export LD_LIBRARY_PATH="$kept/lib:$toolkit/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" CUDA_PATH=$toolkit
# what is tuned is for one kind of GPU; by kernels that do nothing, for none
idle=
[ "${CUDA_ON_CPU_RUN:-}" != no ] || idle=-idle
export CUDA_ON_CPU_CACHE=$kept/modules XDG_CACHE_HOME=$kept/cache${CUDA_ON_CPU_CAPABILITY:-}$idle
# tuning runs each candidate several times, and here every one of them is slow
export CUBECL_AUTOTUNE_LEVEL=${CUBECL_AUTOTUNE_LEVEL:-minimal}
exec "$@"

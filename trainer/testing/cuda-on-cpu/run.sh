#!/usr/bin/env bash
# Runs a program of the CUDA build on the stand-in for NVIDIA's driver: run.sh PYTHON COMMAND…
#
# PYTHON must have NVIDIA's compiler and headers: pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt
# nvidia-cuda-cccl. Builds the stand-in (cargo build --release -p cuda-on-cpu) if it is missing; CUDA_ON_CPU_LIBRARY names another
# one. src/lib.rs documents the variables, such as CUDA_ON_CPU_GPUS. Compiled kernels are kept in target/cuda-on-cpu, apart from
# those of real GPUs.
set -euo pipefail
python=${1:?usage: run.sh PYTHON COMMAND…}
shift
root=$(cd "$(dirname "$0")/../../.." && pwd)
target=${CARGO_TARGET_DIR:-$root/target}
library=${CUDA_ON_CPU_LIBRARY:-$target/release/libcuda_on_cpu.so}
[ -e "$library" ] || (cd "$root" && cargo build --release -p cuda-on-cpu)
toolkit=$("$python" -c '
import glob, sys
found = [p for root in sys.path for p in glob.glob(f"{root}/nvidia/cu*") if glob.glob(f"{p}/lib/libnvrtc.so.*")]
print(found[0] if found else "")')
[ -n "$toolkit" ] || { echo "run.sh: the package nvidia-cuda-nvrtc is not installed for $python" >&2; exit 2; }
# As new as NVRTC: the driver refuses newer PTX, and the program a newer NVRTC.
version=$("$python" -c '
from importlib.metadata import distributions
packages = (d for d in distributions() if (d.name or "").startswith("nvidia-cuda-nvrtc"))
print(".".join(next(packages).version.split(".")[:2]))')
export CUDA_ON_CPU_DRIVER=${CUDA_ON_CPU_DRIVER:-$version}
for header in cuda_fp16.h crt/mma.h cccl/cuda/barrier; do
    [ -e "$toolkit/include/$header" ] || { echo "run.sh: $toolkit/include has no $header; pip install nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl" >&2; exit 2; }
done
kept=$target/cuda-on-cpu
# Programs may run side by side with different NCCLs: none, one without the headers' name (the default), or both names.
lib=$kept/lib${CUDA_ON_CPU_NCCL:+-$CUDA_ON_CPU_NCCL}
[ "${CUDA_ON_CPU_NVRTC:-}" != direct ] || lib=$lib-direct
mkdir -p "$lib" "$kept/modules" "$kept/cache"
link() { [ "$(readlink "$2")" = "$1" ] || ln -sf "$1" "$2"; }
link "$(realpath "$library")" "$lib/libcuda.so.1"
link libcuda.so.1 "$lib/libcuda.so"
[ "${CUDA_ON_CPU_NCCL:-}" = no ] || link "$(realpath "$library")" "$lib/libnccl.so.2"
[ "${CUDA_ON_CPU_NCCL:-}" != dev ] || link libnccl.so.2 "$lib/libnccl.so"
nvrtc=$(ls "$toolkit"/lib/libnvrtc.so.* | head -1)
if [ "${CUDA_ON_CPU_NVRTC:-}" = direct ]; then
    link "$nvrtc" "$lib/libnvrtc.so"
else
    link "$(realpath "$library")" "$lib/libnvrtc.so"
    export CUDA_ON_CPU_NVRTC=${CUDA_ON_CPU_NVRTC:-$nvrtc}
fi
export LD_LIBRARY_PATH="$lib:$toolkit/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" CUDA_PATH=$toolkit
# Tuning results hold for one compute capability, and for no GPU at all if kernels do nothing.
idle=
[ "${CUDA_ON_CPU_RUN:-}" != no ] || idle=-idle
export CUDA_ON_CPU_CACHE=$kept/modules XDG_CACHE_HOME=$kept/cache${CUDA_ON_CPU_CAPABILITY:-}$idle
# The stand-in's GPUs have different names and are the same.
export CUBECL_ENVIRONMENT=${CUBECL_ENVIRONMENT-on-cpu}
# Autotuning runs each candidate several times, and here every candidate is slow.
export CUBECL_AUTOTUNE_LEVEL=${CUBECL_AUTOTUNE_LEVEL:-minimal}
exec "$@"

#!/usr/bin/env bash
# Runs a job of two hosts with two GPUs each on one machine with four: two_hosts.sh TRAINER OUT [FLAG…]
#
# To the ranks, a PID namespace looks like a second host (Linux, root). Gradients go through the custom kernels inside a host, and
# through NCCL between hosts, or TCP without NCCL.
set -uo pipefail
trainer=$(realpath "$1") out=$2
shift 2
cd "$(dirname "$0")/../.."
# Not a port of the tests that may run beside this script, nor one that the system hands out.
port=$((10000 + RANDOM % 5000))
node() { # RANK GPUS
    NCCL_HOSTID=host$1 CUDA_VISIBLE_DEVICES=$2 "$trainer" --config configs/quickstart.toml --gpus 2 --nnodes 2 --node-rank "$1" \
        --master-addr 127.0.0.1 --master-port $port --run-dir "$out/hosts-$1" "${@:3}"
}
export -f node
export trainer port out
node 0 0,1 "$@" &
first=$!
trap 'kill $first 2>/dev/null' EXIT
unshare --pid --fork --mount-proc bash -c 'node 1 2,3 "$@"' - "$@" || exit 1
wait $first

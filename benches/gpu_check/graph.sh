#!/usr/bin/env bash
# Compares a run on a GPU whose steps are CUDA graphs with the same run launched kernel by kernel: graph.sh TRAINER OUT [CALLS]
#
# 56 steps (EPOCHS=4, IMAGES=212) with a changing learning rate, two batches a step, a weight average and clipping; an epoch's last
# step has fewer images. A second network has batch norms and grouped convolutions, AdamW, and smaller images in the first epoch, so
# two graphs are recorded. Weights, optimizer state, statistics and weight average must be the same to the bit. CALLS is the
# stand-in's log (CUDA_ON_CPU_LOG): with it, the calls of a step are counted.
set -euo pipefail
trainer=${1:?usage: graph.sh TRAINER OUT [CALLS]}
out=${2:?usage: graph.sh TRAINER OUT [CALLS]}
calls=${3:-}
source "$(dirname "$0")/runs.sh"
rm -rf "$out"
mkdir -p "$out"
cat >"$out/lenet.toml" <<TOML
[model]
name = "lenet"
[data]
name = "fashion-mini"
augment = ["crop", "flip"]
limit_train = ${IMAGES:-212}
limit_test = 32
[train]
epochs = ${EPOCHS:-4}
batch_size = 8
accumulate = 2
ema = 0.9
grad_clip = 1.0
[optimizer]
nesterov = true
[schedule]
kind = "one-cycle"
TOML
cat >"$out/shufflenet.toml" <<'TOML'
[model]
name = "shufflenetv2_x0_5"
[data]
name = "fashion-mini"
limit_train = 22
limit_test = 4
[train]
epochs = 2
image_sizes = [14]
image_milestones = [0.5]
batch_size = 4
precision = "bf16"
[optimizer]
kind = "adamw"
TOML
for network in lenet shufflenet; do
    for graph in true false; do
        run "$network-$graph" 1 --config "$out/$network.toml" --set train.graph=$graph
    done
    same "$out/$network-true"/* "$out/$network-false"/*
    steps=$(wc -l <"$(echo "$out/$network"-true/*/metrics.jsonl)")
    echo "$network: $steps steps with the same weights, optimizer state and weight average, to the bit"
    [ -n "$calls" ] || continue
    # Between two launches of the graph that follow each other: no kernel, and mostly no copy. Inputs and results of several steps are
    # copied together.
    awk -v network="$network" '
        / cuGraphLaunch\(/ {
            if (open && kernels == 0) { pairs++; if (to + from == 0) alone++; if (to > most) most = to; if (from > back) back = from }
            graphs++; open = 1; kernels = to = from = 0
        }
        / cuLaunchKernel/ { kernels++ }
        / cuMemcpyHtoD/ { to++ }
        / cuMemcpyDtoH/ { from++ }
        / cuStreamEndCapture\(/ { nodes = 0 }
        / cuGraphNodeGetType\(/ { nodes++ }
        END {
            if (graphs == 0 || alone == 0) { print network ": no step was a graph alone"; exit 1 }
            if (most > 1 || back > 1) {
                print network ": " most " copies to the GPU and " back " to the host between two graphs"
                exit 1
            }
            printf "%s: %d of its steps are one launch of a graph of %d kernels. Of %d pairs that follow each other, %d have no copy between them, the others one each way\n",
                network, graphs, nodes, pairs, alone
        }' "$out/$network-true.calls"
    echo "$network: launched kernel by kernel, the run has $(grep -c cuLaunchKernel "$out/$network-false.calls") launches"
done

#!/usr/bin/env bash
# Compares runs on several GPUs whose steps are CUDA graphs, with the sums of gradients in them, with the same runs launched kernel
# by kernel: ddp_graph.sh TRAINER OUT [CALLS]
#
# 56 steps (EPOCHS=4, IMAGES=212) on two and on three ranks (RANKS="2 3") with a changing learning rate, two batches a step, a weight
# average and clipping; an epoch's last step has fewer images, and three ranks have unequal shares. Weights, optimizer state and
# weight average must be the same to the bit, also after a resume in the middle. Then a run whose loss is not finite, and a run whose
# second rank is killed: the other rank must report the killed one. With SLOW=1 also synchronised batch norm with gradients in bf16,
# whose hundreds of collectives per step take long on the stand-in. CALLS is the stand-in's log (CUDA_ON_CPU_LOG): with it, the calls
# of a step are counted.
set -euo pipefail
trainer=${1:?usage: ddp_graph.sh TRAINER OUT [CALLS]}
out=${2:?usage: ddp_graph.sh TRAINER OUT [CALLS]}
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
batch_scope = "global"
batch_size = 8
accumulate = 2
ema = 0.9
grad_clip = 1.0
[optimizer]
nesterov = true
[schedule]
kind = "one-cycle"
[parallel]
backend = "cuda"
first_bucket_mb = 0.01
bucket_mb = 0.05
TOML
for gpus in ${RANKS:-2 3}; do
    for graph in true false; do
        run "lenet-$gpus-$graph" "$gpus" --config "$out/lenet.toml" --set train.graph=$graph --set checkpoint.every=1
    done
    same "$out/lenet-$gpus-true"/* "$out/lenet-$gpus-false"/*
    steps=$(wc -l <"$(echo "$out/lenet-$gpus-true"/*/metrics.jsonl)")
    echo "lenet on $gpus ranks: $steps steps with the same weights, optimizer state and weight average, to the bit"
    [ -n "$calls" ] || continue
    # Between two launches of a rank's graph that follow each other: no kernel, no event, and mostly no copy. Inputs and results of
    # several steps are copied together.
    awk -v name="lenet on $gpus ranks" -v ranks="$gpus" '
        / cuGraphLaunch\(/ {
            if (open[$1] && kernels[$1] == 0) {
                pairs++
                if (to[$1] + from[$1] == 0) { alone++; host += others[$1] }
                if (to[$1] > most) most = to[$1]
                if (from[$1] > back) back = from[$1]
            }
            graphs++; open[$1] = 1; kernels[$1] = to[$1] = from[$1] = others[$1] = 0; next
        }
        / cuLaunchKernel/ { kernels[$1]++ }
        / cuMemcpyHtoD/ { to[$1]++ }
        / cuMemcpyDtoH/ { from[$1]++ }
        / cuGraphNodeGetType\(/ { nodes++ }
        ! / cuCtxSetCurrent\(/ { others[$1]++ }
        END {
            if (graphs == 0 || alone == 0) { print name ": no step was a graph alone"; exit 1 }
            if (most > 1 || back > 1) {
                print name ": " most " copies to the GPU and " back " to the host between two graphs"
                exit 1
            }
            printf "%s: %d steps of a rank are one launch of a graph of %d kernels. Of %d pairs that follow each other, %d have no copy between them (%d other calls in all), the others one each way\n",
                name, graphs / ranks, nodes / ranks, pairs, alone, host
        }' "$out/lenet-$gpus-true.calls"
    launches=$(grep -c cuLaunchKernel "$out/lenet-$gpus-false.calls")
    echo "lenet on $gpus ranks: launched kernel by kernel, a rank has $((launches / gpus)) launches"
done
# Resumed after the first epoch.
whole=$(echo "$out"/lenet-2-true/*)
resumed=$out/resumed
cp -a "$whole" "$resumed"
rm -rf "$resumed"/checkpoints/{epoch-[2-9],best,last} "$resumed/summary.json"
ln -s epoch-1 "$resumed/checkpoints/last"
"$trainer" --resume "$resumed" --gpus 2 >"$out/resumed.txt" 2>&1 || { tail -n 20 "$out/resumed.txt"; exit 1; }
same "$whole" "$resumed"
echo "resumed after the first epoch: the same, to the bit"
# Weights that grow until the loss is not finite, while graphs run: all ranks stop, and the error names the same step as without
# graphs. Also where several steps are queued and the epoch's last step, without a graph, follows.
for graph in true false; do
    ! "$trainer" --config "$out/lenet.toml" --gpus 2 --run-dir "$out/diverged-$graph" --set train.graph=$graph --set train.grad_clip=0 \
        --set schedule.kind=constant --set optimizer.lr=3 --set optimizer.weight_decay=1 >"$out/diverged-$graph.txt" 2>&1 ||
        { echo "the run did not diverge"; exit 1; }
    # One line per rank.
    grep -o "epoch 1, step [0-9]*: the training loss is .*" "$out/diverged-$graph.txt" >"$out/diverged-$graph.error" || true
    [ "$(wc -l <"$out/diverged-$graph.error")" = 2 ] || { cat "$out/diverged-$graph.txt"; exit 1; }
done
cmp "$out"/diverged-{true,false}.error
echo "diverged, with and without graphs: $(head -n 1 "$out/diverged-true.error")"
# A rank that is killed while graphs run.
"$trainer" --config "$out/lenet.toml" --gpus 2 --run-dir "$out/killed" --set train.epochs=1000 --set parallel.timeout_s=120 \
    >"$out/killed.txt" 2>&1 &
launcher=$!
until [ "$(cat "$out"/killed/*/metrics.jsonl 2>/dev/null | wc -l)" -gt 8 ]; do
    kill -0 $launcher || { cat "$out/killed.txt"; exit 1; }
    sleep 0.2
done
kill -KILL "$(pgrep -P $launcher | tail -n 1)"
! wait $launcher
grep "^error: rank . was killed by SIGKILL" "$out/killed.txt"
grep "because of it: rank" "$out/killed.txt"
[ -n "${SLOW:-}" ] || exit 0
cat >"$out/shufflenet.toml" <<'TOML'
[model]
name = "shufflenetv2_x0_5"
[data]
name = "fashion-mini"
limit_train = 44
limit_test = 8
[train]
epochs = 1
batch_scope = "global"
batch_size = 8
precision = "bf16"
[optimizer]
kind = "adamw"
[parallel]
backend = "cuda"
batch_norm = "sync"
compression = "bf16"
TOML
for graph in true false; do run "shufflenet-$graph" 2 --config "$out/shufflenet.toml" --set train.graph=$graph; done
same "$out/shufflenet-true"/* "$out/shufflenet-false"/*
echo "shufflenet with synchronised batch norm and gradients in bf16: the same, to the bit"

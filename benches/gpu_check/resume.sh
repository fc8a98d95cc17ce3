#!/usr/bin/env bash
# Compares a run on a GPU that is resumed after its first epoch with the same run without an interruption: resume.sh TRAINER OUT
#
# Weights, optimizer state and weight average must be the same to the bit. Their memory on a GPU has another order than their files.
set -euo pipefail
trainer=${1:?usage: resume.sh TRAINER OUT}
out=${2:?usage: resume.sh TRAINER OUT}
rm -rf "$out"
mkdir -p "$out"
"$trainer" --config configs/quickstart.toml --gpus 1 --run-dir "$out" --epochs 2 --set train.batch_size=32 --set data.limit_train=64 \
    --set data.limit_test=64 --set checkpoint.every=1 --set train.ema=0.9 >"$out/whole.txt"
whole=$(echo "$out"/*-lenet-*)
resumed=$out/resumed
cp -a "$whole" "$resumed"
rm -rf "$resumed"/checkpoints/{epoch-2,best,last} "$resumed/summary.json"
ln -s epoch-1 "$resumed/checkpoints/last"
"$trainer" --resume "$resumed" --gpus 1 >"$out/resumed.txt"
for file in model optimizer ema; do
    cmp "$whole/checkpoints/epoch-2/$file.safetensors" "$resumed/checkpoints/epoch-2/$file.safetensors"
done
echo "resumed after an epoch: the same weights, optimizer state and weight average, to the bit"

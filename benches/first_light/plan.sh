# The steps of first_light.sh in their order. first_light.sh sources this file and defines `step`, `skip` and the variables.
# shellcheck shell=bash disable=SC2154

quickstart=$root/configs/quickstart.toml
run=("$trainer" --run-dir "$work/run" --config)
# Two ranks on the first GPU. With --oversubscribe, kernels and tuning results are kept apart from those of other runs.
pair=("${one[@]}" "${run[@]}" "$quickstart" --gpus 2 --oversubscribe --set parallel.check_sync_every=1)
small=("$check" --ranks 2 --sizes 1,1023,4100 --rounds 1)
sanitizer() { # GROUP TOOL: the sanitizer follows every rank
    if command -v compute-sanitizer >/dev/null; then
        step "$1" "$2" run 100 "${one[@]}" compute-sanitizer --tool "$2" --target-processes all --error-exitcode 86 "${small[@]}"
    else
        skip "$1" "$2" run "compute-sanitizer is not installed"
    fi
}

# The first ten minutes. What needs no tuning comes first, since tuning is slow and hides the cause of a failure.
step checks machine machine 30 bash -c 'nvidia-smi; nvcc --version; exit 0'
step checks doctor doctor 60 "$trainer" doctor --json
step checks ranks run 60 "${one[@]}" "${small[@]}"
sanitizer checks memcheck
# shellcheck disable=SC2086
step checks ops run 300 "$check" --ops --ranks 1 ${OPS:-}

# The first run compiles and tunes. The others find all kernels, and their losses must be the same bits, with CUDA graphs and without.
step training quickstart "train:$cold:$top1" 150 "${run[@]}" "$quickstart" --gpus 1 "${flags[@]}"
step training quickstart-2 "train:warm:$top1" 60 "${run[@]}" "$quickstart" --gpus 1 "${flags[@]}"
step training quickstart-3 "repeat:quickstart-2" 60 "${run[@]}" "$quickstart" --gpus 1 "${flags[@]}"
step training launched "repeat:quickstart-2" 60 "${run[@]}" "$quickstart" --gpus 1 "${flags[@]}" --set train.graph=false
step training five-steps train 150 "${run[@]}" "$quickstart" --gpus 1 --set train.batch_size=128 "${flags[@]}" \
    --set "model.name=$network" --set train.max_steps=5
step training clip train 120 "${pair[@]}" --set train.epochs=1 "${flags[@]}" --set train.grad_clip=1
# The last batch has fewer images than the others: 1000 = 7 * 128 + 104.
partial=("${pair[@]}" --set train.epochs=1 --set train.batch_size=128 --set data.limit_train=1000 "${flags[@]}"
    --set "model.name=$network" --set parallel.batch_norm=sync)
step training sync-bn train 150 "${partial[@]}"
step training killed-rank run 60 bash "$here/first_light/kill_rank.sh" "$work/run" "${pair[@]}" "${flags[@]}" \
    --set train.epochs=10000

# Training steps, ours and PyTorch's in turn.
has_torch() { # importing PyTorch takes seconds: look once per call
    if [ -z "${no_torch+looked}" ]; then
        no_torch=$(timeout 100 "$python" -B "$here/peers/step.py" --available "$peer_device" 2>&1 9>&- </dev/null) &&
            no_torch='' || no_torch=$(tail -n 1 <<<"${no_torch:-no answer}")
    fi
    [ -z "$no_torch" ]
}
torch() { # GROUP NAME KIND COMMAND…: a step of PyTorch, where there is one
    if pending "$1" "$2" && ! has_torch; then skip "$1" "$2" "$3" "$no_torch ($python)"; else step "$1" "$2" "$3" 240 "${@:4}"; fi
}
peer_device=${PEER_DEVICE:-cuda} threads=0
[ "$peer_device" = cuda ] || threads=$(nproc)
for precision in bf16 f32; do
    for batch in "${batches[@]}"; do
        for name in "${networks[@]}"; do
            step times "$name-$batch-$precision" "time:$name:$batch:$precision" 200 "${one[@]}" "$bench" --device cuda \
                --precision "$precision" --launches --batch "$batch" --steps "$steps" --rounds 3 --json "$work/step.json" "$name"
            [ $precision = f32 ] || torch times "$name-$batch-pytorch" "time:$name:$batch:pytorch" "${one[@]}" \
                "$python" -B "$here/peers/step.py" "$name" "$batch" "$steps" "$threads" best
        done
    done
done

# Whole runs in bf16.
step epochs quickstart-bf16 "train:warm:$top1" 150 "${run[@]}" "$quickstart" --gpus 1 --set train.precision=bf16 "${flags[@]}"
epoch=$(basename "$epoch_config" .toml)
epoch=epoch-${epoch#cifar_}
dataset=$(sed -n '/^\[data\]/,/^\[model\]\|^\[train\]/s/^name *= *"\(.*\)".*/\1/p' "$epoch_config")
if missing=$("$trainer" data verify "$dataset" --data-dir "$data" 2>&1 >/dev/null); then
    step epochs "$epoch" train 300 "${run[@]}" "$epoch_config" --gpus 1 --data-dir "$data" --set train.precision=bf16 \
        --set train.epochs=1 "${flags[@]}"
else
    skip epochs "$epoch" train "no $dataset in DATA: ${missing%%$'\n'*}"
fi

# More of the same, slower. With several GPUs one rank per GPU.
step more networks run 250 "$check" --networks "$(IFS=,; echo "${compared[*]}")" --ranks 1
step more matrix run 200 "$check" --ranks "${RANKS:-2,4}" ${SIZES:+--sizes "$SIZES"}
step more losses run 250 "$check" --ranks 1 --trainer "$trainer" ${TRAIN:+--train "$TRAIN"}
step more allreduce run 60 "$trainer" bench allreduce "${several[@]}" --sizes 4,65536,44695848 --ms 200
step more compare run 200 "$trainer" compare --config "$quickstart" "${several[@]}" --steps 10 --rounds 1 \
    --out "$work/run/compare" "${flags[@]}" --set train.epochs=100
sanitizer more racecheck
sanitizer more initcheck

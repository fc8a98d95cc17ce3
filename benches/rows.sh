#!/usr/bin/env bash
# Trains a list of configurations one after another, at the lowest priority: "leave it running overnight".
#
#   rows.sh train OUT [CONFIG.toml ...]   train; without CONFIG, continue with the list of the last call
#   rows.sh status OUT                    show epoch, accuracy and time left of each configuration
#   rows.sh pause OUT, rows.sh continue OUT
#   rows.sh stop OUT                      save a checkpoint, end, and wait for it; `train OUT` continues there, also after a reboot
#
# OUT gets queue/ (the configurations), runs/, logs/ and results/ (summaries of finished runs, to be committed).
# Variables: TRAINER, the program (default target/release/trainer); DATA, the data folder; FLAGS, more flags of the first start,
# e.g. "--gpus 1 --set train.precision=bf16"; LIMIT, seconds after which this call saves and ends (default: none);
# NICE, from 0, the priority of other programs, to 19, the lowest (default).
set -uo pipefail

usage() { sed -n '2,/^set/{/^set/d;p}' "$0" >&2; exit 2; }
die() { echo "rows.sh: $1" >&2; echo "hint: $2" >&2; exit 2; }
[ $# -ge 2 ] || usage
command=$1 out=$2
shift 2
case $command in train | status | pause | continue | stop) ;; *) usage ;; esac
[ "$command" = train ] || [ -e "$out/queue/order" ] || die "$out has no queue" "start one with: rows.sh train $out CONFIG.toml"
[ "$command" = train ] || [ $# -eq 0 ] || usage

# Names of the queue's configurations, in the order of training.
queue() { cat "$out/queue/order"; }
# The run folder of a configuration; empty before its first start. A folder without config.toml is left by a start that failed.
run_of() { ls -d "$out/runs/$1"/*/config.toml 2>/dev/null | tail -1 | sed 's/config.toml$//'; }
# The process that trains now; fails if there is none. A number that another process has by now is not taken for it.
training() {
    local pid
    pid=$(cat "$out/pid" 2>/dev/null) && grep -qzF "$(realpath "$out")" "/proc/$pid/cmdline" 2>/dev/null && echo "$pid"
}
state_of() {
    if [ -e "$out/results/$1.done" ]; then echo finished
    elif [ "$(cat "$out/current" 2>/dev/null)" = "$1" ] && pid=$(training); then
        case $(sed 's/.*) //' "/proc/$pid/stat") in T*) echo paused ;; *) echo training ;; esac
    elif [ -e "$out/logs/$1.failed" ]; then echo "failed, see $out/logs/$1.log"
    elif [ -n "$(run_of "$1")" ]; then echo interrupted
    else echo waiting; fi
}
# The time left by the program's last line in the log; empty before its first line.
left_of() {
    if [ -e "$out/results/$1.done" ]; then echo 0
    else grep -ao 'run [0-9][0-9dhms.]*$' "$out/logs/$1.log" 2>/dev/null | tail -n 1 | cut -c 5-; fi
}
# One line per configuration: the epochs of summary.csv, and the time that the others will take.
status() {
    printf '%-28s %-10s %9s %9s %11s\n' configuration epoch 'best %' 'last %' 'time left'
    queue | while IFS= read -r name; do
        run=$(run_of "$name")
        epochs=$(sed -n 's/^epochs = //p' "${run:-/nonexistent}/config.toml" 2>/dev/null)
        awk -F, -v name="$name" -v epochs="${epochs:--}" -v left="$(left_of "$name")" -v state="$(state_of "$name")" '
            NR == 1 { for (i = 1; i <= NF; i++) column[$i] = i; next }
            $column["eval_top1"] != "" { last = $column["eval_top1"]; if (best == "" || last + 0 > best + 0) best = last }
            { done = $column["epoch"] }
            END {
                printf "%-28s %-10s %9s %9s %11s  %s\n", name, (done == "" ? 0 : done) "/" epochs, best == "" ? "-" : best,
                    last == "" ? "-" : last, left == "" ? "-" : left, state
            }' "${run:-/nonexistent}/summary.csv" 2>/dev/null ||
            printf '%-28s %-10s %9s %9s %11s  %s\n' "$name" "0/${epochs:--}" - - - "$(state_of "$name")"
    done
}
# The training process: the launcher, if there are several workers.
pid_or_die() { training || die "nothing is being trained in $out" "rows.sh status $out shows the queue"; }
# All processes of the training, which has its own session.
session() { local pid; pid=$(pid_or_die) && kill "-$1" $(pgrep -s "$pid"); }
case $command in
status) status; exit ;;
pause) session STOP; exit ;;
continue) session CONT; exit ;;
stop) touch "$out/stop"; session CONT && kill -TERM "$(pid_or_die)" && exec flock "$out/lock" true; exit ;;
esac

trainer=$(realpath -e "${TRAINER:-target/release/trainer}" 2>/dev/null) ||
    die "${TRAINER:-target/release/trainer} does not exist" "build it with cargo build --release, or set TRAINER"
for config in "$@"; do
    [ -f "$config" ] || die "$config is not a file" "name TOML files, e.g. configs/cifar_vgg16.toml"
done
nice=${NICE:-19}
[[ $nice =~ ^1?[0-9]$ ]] || die "NICE=$nice is not a whole number from 0 to 19" "unset it for the lowest priority, 19"
mkdir -p "$out"/{queue,runs,logs,results} || exit 1
out=$(realpath "$out")
exec 9>"$out/lock"
flock -n 9 || die "another rows.sh trains in $out" "rows.sh status $out shows where it is, rows.sh stop $out ends it"
if [ $# -gt 0 ]; then
    cp "$@" "$out/queue" && basename -s .toml -a "$@" >"$out/queue/order" || exit 1
fi
[ -e "$out/queue/order" ] || die "$out has no queue" "start one with: rows.sh train $out CONFIG.toml"
rm -f "$out/stop" "$out"/logs/*.failed
read -ra flags <<<"${FLAGS:-}"
data=()
[ -z "${DATA:-}" ] || data=(--data-dir "$DATA")

# Linux compares nice values within a session only, and shares the processor evenly among sessions (sched_autogroup). The program
# therefore gets a session of its own, with this priority among sessions.
at_low_priority() {
    exec setsid nice -n "$nice" bash -c '{ echo '"$nice"' >/proc/self/autogroup; } 2>/dev/null; exec "$@"' - "$@"
}

failed=0
# All names at once: `train` replaces the file, and the program below must not read it as its input.
mapfile -t names < <(queue)
for name in "${names[@]}"; do
    [ ! -e "$out/results/$name.done" ] || continue
    [ ! -e "$out/stop" ] || break
    run=$(run_of "$name")
    what=(--config "$out/queue/$name.toml" --run-dir "$out/runs/$name" "${flags[@]}")
    [ -z "$run" ] || what=(--resume "$run")
    if [ -n "${LIMIT:-}" ]; then
        # Leave time for saving.
        left=$((LIMIT - SECONDS - 30))
        [ $left -gt 0 ] || break
    fi
    echo "$(date '+%F %T') $name"
    echo "$name" >"$out/current"
    at_low_priority "$trainer" "${what[@]}" "${data[@]}" >>"$out/logs/$name.log" 2>&1 9>&- &
    echo $! >"$out/pid"
    # A signal, not train.max_time_s, which evaluates once more than the whole run would.
    alarm=
    [ -z "${LIMIT:-}" ] || { { sleep "$left" && touch "$out/stop" && kill -TERM "$(cat "$out/pid")"; } 2>/dev/null 9>&- & alarm=$!; }
    trap 'touch "$out/stop"; kill -TERM $(cat "$out/pid")' INT TERM HUP
    # A signal interrupts `wait`; the program still has to save.
    until wait "$(cat "$out/pid")"; code=$?; ! kill -0 "$(cat "$out/pid")" 2>/dev/null; do :; done
    [ -z "$alarm" ] || pkill -P "$alarm" sleep
    rm -f "$out/pid"
    run=$(run_of "$name")
    # Early stopping and train.max_steps end a run before its last epoch. A run that is out of time goes on in the next call.
    if [ $code -eq 0 ] && ! grep -q 'train.max_time_s is over' "$run/summary.json"; then
        "$trainer" table "$run" --save "$out/results" >>"$out/logs/$name.log" 2>&1 && touch "$out/results/$name.done" || failed=1
    elif [ $code -ne 0 ] && [ ! -e "$out/stop" ]; then
        echo "$name failed with exit code $code: $out/logs/$name.log"
        touch "$out/logs/$name.failed"
        failed=1
    fi
done
status
exit $failed

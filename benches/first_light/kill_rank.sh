#!/usr/bin/env bash
# Kills one rank of a job after its third step. The job must end with exit code 3 and name the rank: kill_rank.sh RUNS COMMAND…
# COMMAND is `trainer` with --run-dir RUNS and two ranks.
set -uo pipefail
runs=$1
shift
"$@" >"$runs/said" 2>&1 &
job=$!
trap 'kill -TERM $job' TERM INT
fail() { cat "$runs/said"; echo "error: $1"; exit 1; }
until [ "$(cat "$runs"/*/metrics.jsonl 2>/dev/null | wc -l)" -ge 3 ]; do
    kill -0 $job 2>/dev/null || { wait $job; fail "the job ended with exit code $? before its third step"; }
    sleep 0.2
done
# The last child is a rank. A line of stat is "pid (name) state ppid …".
rank=
for stat in /proc/[0-9]*/stat; do
    line=$(cat "$stat" 2>/dev/null) || continue
    read -r _ parent _ <<<"${line##*) }"
    [ "$parent" != $job ] || rank=${line%% *}
done
[ -n "$rank" ] || fail "the job has no child processes"
kill -KILL "$rank"
begun=$SECONDS
wait $job
code=$?
[ $code = 3 ] || fail "the job ended with exit code $code, not 3, after one of its ranks was killed"
grep -qE "rank [0-9]+.*(signal 9|SIGKILL)" "$runs/said" || fail "the job does not name the rank that was killed"
cat "$runs/said"
echo "the job ended $((SECONDS - begun)) s after a rank was killed, and named the rank"

#!/usr/bin/env bash
# test/drills/run_launch.sh BUILD/trifold   Jobs of several processes under mpirun, and by other launchers' variables: they meet, sum along two axes,
# and leave; a rank that is killed is named once; nobody outlives a launcher that is killed. Uses drill_ranks of the same build folder.
set -uo pipefail
ranks=$(cd "$(dirname "$1")" && pwd)/drill_ranks
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0 checks=0

check() {  # check NAME CODE SENTENCES PATTERN: of the last job
    checks=$((checks + 1))
    if [ "$code" -ne "$2" ] || [ "$(grep -c 'says: ' "$work/out")" -ne "$3" ] || ! grep -q -- "$4" "$work/out"; then
        echo "$1: exit code $code (wanted $2), wanted $3 sentence(s) and '$4', got:"
        sed 's/^/    /' "$work/out"
        failed=1
    fi
}
long=steps=$((100000 + $$))  # tells the ranks of the job whose launcher is killed from all others
alive() { ps -eo pid=,stat=,args= | awk -v mark="$long" '$2 !~ /^Z/ && $3 ~ /drill_ranks$/ && $4 == mark { print $1 }'; }

job() {  # job COMMAND...: its output in $work/out
    timeout 100 "$@" >"$work/out" 2>&1
    code=$?
}
by_variables() {  # by_variables RANKS ARGUMENT...: as srun would start them
    local n=$1 r pids=()
    shift
    for ((r = 0; r < n; r++)); do
        SLURM_STEP_ID=0 SLURM_PROCID=$r SLURM_STEP_NUM_TASKS=$n SLURM_LOCALID=$r timeout 100 "$ranks" "$@" >"$work/out.$r" 2>&1 &
        pids+=($!)
    done
    code=0
    for r in "${pids[@]}"; do wait "$r" || code=$?; done
    cat "$work"/out.* >"$work/out"
    rm -f "$work"/out.*
}

job "$ranks"
check "alone" 0 0 "1 ranks of 1"
by_variables 3
check "srun without a store" 2 1 "give --launch.store=HOST:PORT"
by_variables 3 store=localhost:$((20000 + $$ % 10000))
check "srun" 0 0 "3 ranks of 3"

if command -v mpirun >/dev/null; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    mpi=(mpirun --oversubscribe --bind-to none)
    job "${mpi[@]}" -n 1 "$ranks"
    check "mpirun -n 1" 0 0 "1 ranks of 1"
    job "${mpi[@]}" -n 8 "$ranks"
    check "mpirun -n 8" 0 0 "8 ranks of 8"
    job "${mpi[@]}" -n 8 "$ranks" trouble=kill rank=5 step=3
    check "a killed rank" "$code" 1 "rank 5 on .* ended without a word"
    job "${mpi[@]}" -n 8 "$ranks" trouble=kill rank=0 step=3
    check "rank 0 killed" "$code" 1 "rank 0, which keeps the store"
    job "${mpi[@]}" -n 8 "$ranks" trouble=data rank=3 step=3
    check "a problem of one rank" 3 1 "rank 3 says: tokens.bin ends at byte 7"
    job "${mpi[@]}" -n 4 "$ranks" interface=no-such-interface
    check "an unknown interface" 2 1 "has no such interface"

    checks=$((checks + 1))
    "${mpi[@]}" -n 4 "$ranks" "$long" >"$work/out" 2>&1 &
    launcher=$!
    for _ in $(seq 100); do
        [ "$(alive | wc -l)" -eq 4 ] && break
        sleep 0.1
    done
    sleep 1
    { kill -9 $launcher && wait $launcher; } 2>/dev/null
    for _ in $(seq 50); do
        [ -z "$(alive)" ] && break
        sleep 0.1
    done
    orphans=$(alive)
    if [ -n "$orphans" ]; then
        echo "$(wc -w <<<"$orphans") ranks outlive mpirun"
        kill -9 $orphans
        failed=1
    fi
else
    echo "no mpirun here: jobs under it were not tried"
fi
[ $failed -eq 0 ] && echo "$checks jobs ended as they should"
exit $failed

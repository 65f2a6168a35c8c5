#!/usr/bin/env bash
# scripts/bench_folding.sh [BUILD] [options]   How much of the communication is hidden behind computation, and what many ranks cost.
#
#   folding    four hosts made by netns_cluster.sh, one rank each, one case per axis. The step is timed without a limit first; the links then
#              get the rate at which the messages of a step, waited for, take as long as that: first by its bytes (trifold plan), then by a
#              trial. overlap.AXIS=on and off in turn, A B A B.
#   cpu        CPU seconds of a step of 8 ranks (tp 2, pp 2, dp 2) against one rank with a thread on each core, same global batch: 12 layers,
#              hidden 768, sequence 512, global batch 16, bf16. Steps after the first, A B A B.
#   start      from mpirun to the end of the first step of a small model: 8 ranks minus one rank
#
#   --parts "folding cpu start"  --cases "dp pp tp"  --rounds 2  --steps 6  --warmup 1  --out docs/measured/DATE-folding (.md, .json)
#   --cpus share: netns_cluster's CPUS    --load 1: communication over computation that the rate aims at
#   --quick: one round, 3 steps, no cpu part; writes nothing
#
# Exit code 1 when a bar is missed; the lines with MISSED say which. Needs root (network namespaces) and a quiet machine: about 9 minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=/dev/null
. scripts/measure.sh
die() { echo "bench_folding: $*" >&2; exit 2; }
say() { echo "$*" >&2; }

build=build parts="folding cpu start" cases="dp pp tp" rounds=2 steps=6 warmup=1 cpus=share load=1 out=docs/measured/$(date +%F)-folding quick=no
while [ $# -gt 0 ]; do
    case $1 in
        --quick) quick=yes rounds=1 steps=3 parts="folding start" ;;
        --parts | --cases | --rounds | --steps | --warmup | --cpus | --load | --out)
            [ $# -ge 2 ] || die "$1 needs a value"
            printf -v "${1#--}" %s "$2"
            shift ;;
        --*) die "unknown option $1" ;;
        *) build=$1 ;;
    esac
    shift
done
trifold=$build/trifold
[ -x "$trifold" ] || die "$trifold is not there: make NATIVE=1, or name another build folder"
declare -A least_ratio=([dp]=1.5 [pp]=1.3 [tp]=1.3) flags_of what_of
least_hidden_dp=0.7 most_cpu=1.3 most_start_s=1.5

work=$(mktemp -d)
pid=
trap '[ -z "$pid" ] || kill -TERM "$pid" 2>/dev/null || true; rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
mpirun=(mpirun --oversubscribe --bind-to none)
common=(--run.device=cpu --run.threads=1 --run.tensorboard=off --checkpoint.resume=none --run.dir="$work/run")
seconds() { date +%s.%N; }
calc() { awk "BEGIN { print $1 }"; }

# In fp32 where every product waits for bytes: CPUs with AMX compute in bf16 about as fast as they move messages, and then have nothing to fold.
# Steps of one to three seconds on two cores, in which each rank computes in one thread. Messages are long beside the 128 KiB or 10 ms that
# netns_cluster lets pass at once.
small="--model.vocab=260 --model.max_seq=512 --data.train=$work/text.bin"
flags_of[dp]="--mesh.dp=4 --optim.zero=1 --model.layers=8 --model.hidden=512 --model.heads=8 --train.global_batch=4 --overlap.dp_bucket=3000000 --train.dtype=bf16 $small"
flags_of[pp]="--mesh.pp=4 --mesh.schedule=zero_bubble --overlap.pp_ahead=1 --model.layers=4 --model.hidden=256 --model.heads=4 --model.tied=off --train.micro_batch=2
    --train.global_batch=48 --train.dtype=bf16 $small"
flags_of[tp]="--mesh.tp=4 --overlap.tp_chunks=4 --model.layers=4 --model.hidden=1024 --model.heads=16 --train.micro_batch=4 --train.global_batch=4 --train.dtype=fp32 $small"
what_of[dp]="8 layers, hidden 512, one sequence of 512 per rank, zero 1"
what_of[pp]="4 layers, hidden 256, zero_bubble, pp_ahead 1, 24 micro-batches of two sequences of 512"
what_of[tp]="4 layers, hidden 1024, fp32, tp_chunks 4, one micro-batch of 4 sequences of 512"

# Runs a command that must succeed, in the background so that signals reach it.
run() {  # run LOG COMMAND...
    local log=$1 code=0
    shift
    timeout -k 10 300 "$@" >"$log" 2>&1 </dev/null &
    pid=$!
    wait "$pid" || code=$?
    pid=
    [ $code -eq 0 ] || { tail -n 20 "$log" >&2; say "bench_folding: this failed with code $code: $*"; exit 1; }
}

# ---------------------------------------------------------------- folding
# train_on_hosts RATE STEPS FLAGS...   Leaves the lines of the steps after warm-up in $work/steps.
train_on_hosts() {
    rm -rf "$work/run"
    CPUS=$cpus run "$work/log" scripts/netns_cluster.sh 4 "$1" -- "$trifold" train "${common[@]}" --train.steps="$2" "${@:3}"
    grep '"loss"' "$work/run/metrics.jsonl" | tail -n +$((warmup + 1)) >"$work/steps"
}
bytes_per_step() {  # bytes_per_step AXIS FLAGS...: that one rank sends, the one that sends most
    "$trifold" plan --ranks 4 --json "${@:2}" 2>"$work/log" | sed -n '/"comm_bytes_per_step"/,/}/p' | sed -n "s/.*\"$1\": *\([0-9]*\).*/\1/p"
}
measure_case() {  # measure_case AXIS: lines of folding.tsv
    local axis=$1 bytes free_s rate mode round
    local -a flags
    read -rd "" -a flags <<<"${flags_of[$axis]}" || true
    bytes=$(bytes_per_step "$axis" "${flags[@]}")
    [ -n "$bytes" ] || { cat "$work/log" >&2; die "trifold plan does not say what $axis sends"; }
    train_on_hosts none $((warmup + 3)) "${flags[@]}"
    free_s=$(field step_s "$work/steps" | median)
    rate=$(calc "sprintf(\"%.0f\", $bytes * 8e-6 / $free_s / $load)")
    # A part of the bytes passes at once: the rate is corrected by what a step is seen to wait for without folding.
    train_on_hosts "${rate}mbit" $((warmup + 3)) "${flags[@]}" "--overlap.$axis=off"
    rate=$(calc "sprintf(\"%.0f\", $rate * $(field "$axis" "$work/steps" | median) / $free_s / $load)")
    printf 'free\t%s\t%s\t%s\t%s\n' "$axis" "$free_s" "$bytes" "$rate" >>"$results"
    say "$axis: a step takes $free_s s without a limit and sends $bytes bytes: $rate mbit"
    for round in $(seq "$rounds"); do
        for mode in on off; do
            train_on_hosts "${rate}mbit" $((warmup + steps)) "${flags[@]}" "--overlap.$axis=$mode"
            paste <(field step_s "$work/steps") <(field "$axis" "$work/steps") | sed "s/^/$mode\t$axis\t/" >>"$results"
            say "$axis, round $round of $rounds, $mode: $(field step_s "$work/steps" | median) s, exposed $(field "$axis" "$work/steps" | median) s"
        done
    done
}
folding() {
    "$trifold" data tokenize README.md docs --out "$work/text" --format llmc >"$work/log" 2>&1 || { cat "$work/log" >&2; die "no data"; }
    for axis in $cases; do measure_case "$axis"; done
}

# ---------------------------------------------------------------- CPU seconds
# User and system seconds so far of all processes of the job that runs, mpirun included.
cpu_so_far() {
    local p
    for p in $(pgrep -f -- "--run.dir=$work/run"); do cat "/proc/$p/stat" 2>/dev/null || true; done |
        awk -v hz="$(getconf CLK_TCK)" '{ sub(/.*\) /, ""); user += $12; kernel += $13 } END { print (user + kernel) / hz, kernel / hz }'
}
# Those of each step but the first, which is the first to touch memory: lines "cpu WHO SECONDS SYSTEM".
cpu_of() {  # cpu_of WHO COMMAND...
    local who=$1 step=0 before=
    rm -rf "$work/run"
    timeout -k 10 600 "${@:2}" >"$work/log" 2>&1 </dev/null &
    pid=$!
    while [ $step -lt 3 ]; do
        kill -0 "$pid" 2>/dev/null || { tail -n 20 "$work/log" >&2; say "bench_folding: this ended early: ${*:2}"; exit 1; }
        if [ "$(cat "$work/run/metrics.jsonl" 2>/dev/null | grep -c loss)" -gt $step ]; then
            step=$((step + 1))
            local now
            now=$(cpu_so_far)
            [ -z "$before" ] || echo "$before $now" | awk -v who="$who" '{ printf "cpu\t%s\t%.2f\t%.2f\n", who, $3 - $1, $4 - $2 }' >>"$results"
            before=$now
        fi
        sleep 0.02
    done
    wait "$pid" || { tail -n 20 "$work/log" >&2; die "this failed: ${*:2}"; }
    pid=
    say "cpu, $who: $(tail -n 1 "$results" | cut -f3) s, $(tail -n 1 "$results" | cut -f4) s of them in the system"
}
cpu() {
    local model="--model.layers=12 --model.hidden=768 --model.heads=12 --model.vocab=50257 --model.max_seq=512 --train.global_batch=16 --train.dtype=bf16 --train.steps=3"
    random_tokens >"$work/tokens.bin"
    local round
    for round in $(seq "$rounds"); do
        # shellcheck disable=SC2086  # words
        cpu_of one "$trifold" train "${common[@]}" --run.threads="$(nproc)" $model --data.train="$work/tokens.bin"
        # shellcheck disable=SC2086  # words
        cpu_of eight "${mpirun[@]}" -n 8 "$trifold" train "${common[@]}" $model --data.train="$work/tokens.bin" --mesh.tp=2 --mesh.pp=2
    done
}
# ---------------------------------------------------------------- start
first_step_s() {  # first_step_s RANKS: from mpirun to the first line of the log
    local begin
    rm -rf "$work/run"
    begin=$(seconds)
    # shellcheck disable=SC2086,SC2046  # words
    timeout -k 10 60 "${mpirun[@]}" -n "$1" "$trifold" train "${common[@]}" --train.steps=1 $small --model.layers=4 --model.hidden=128 --model.heads=4 \
        --train.seq=64 --train.global_batch=8 $([ "$1" = 1 ] || echo --mesh.tp=2 --mesh.pp=2) >"$work/log" 2>&1 </dev/null &
    pid=$!
    until grep -qs '"loss"' "$work/run/metrics.jsonl"; do
        kill -0 "$pid" 2>/dev/null || { tail -n 20 "$work/log" >&2; say "bench_folding: the small run ended early"; exit 1; }
        sleep 0.01
    done
    calc "$(seconds) - $begin"
    wait "$pid"
    pid=
}
start() {
    local ranks
    [ -s "$work/text.bin" ] || "$trifold" data tokenize README.md docs --out "$work/text" --format llmc >"$work/log" 2>&1
    for _ in 1 2 3 4 5; do
        for ranks in 1 8; do printf 'start\t%s\t%s\n' $ranks "$(first_step_s $ranks)" >>"$results"; done
    done
}

# ---------------------------------------------------------------- measure
results=$work/results.tsv
: >"$results"
load_average=$(cut -d' ' -f1 /proc/loadavg)
for part in $parts; do
    [[ $part =~ ^(folding|cpu|start)$ ]] || die "--parts knows folding, cpu and start, not '$part'"
    say "== $part"
    $part
done

# ---------------------------------------------------------------- report
value() { awk -F'\t' -v k="$1" -v a="$2" -v c="$3" '$1 == k && $2 == a { print $c }' "$results" | median; }
judge() {  # judge TEXT VALUE RELATION BOUND
    local verdict=MISSED
    ! awk -v v="$2" -v b="$4" "BEGIN { exit !(v $3 b) }" || verdict=ok
    printf '%-62s %8.3g  (%s %s)  %s\n' "$1" "$2" "$3" "$4" $verdict
}
has() { [[ " $parts " == *" $1 "* ]]; }
folding_table() {
    echo "| axis | step without limit, s | bytes per step | rate, mbit/s | step on, s | step off, s | ratio | exposed on, s | exposed off, s |"
    echo "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for a in $cases; do
        printf '| %s | %.3g | %s | %s | %.3g | %.3g | %.2f | %.3g | %.3g |\n' "$a" "$(value free "$a" 3)" "$(value free "$a" 4)" "$(value free "$a" 5)" \
            "$(value on "$a" 3)" "$(value off "$a" 3)" "$(calc "$(value off "$a" 3) / $(value on "$a" 3)")" "$(value on "$a" 4)" "$(value off "$a" 4)"
    done
}
verdicts() {
    local a
    if has folding; then
        for a in $cases; do
            judge "$a: step with overlap.$a=off over on" "$(calc "$(value off "$a" 3) / $(value on "$a" 3)")" '>=' "${least_ratio[$a]}"
            judge "$a: share of the exposed communication that is gone" "$(calc "1 - $(value on "$a" 4) / $(value off "$a" 4)")" '>=' \
                "$([ "$a" = dp ] && echo $least_hidden_dp || echo 0)"
        done
    fi
    ! has cpu || judge "CPU seconds of a step, 8 ranks over one rank" "$(calc "$(value cpu eight 3) / $(value cpu one 3)")" '<=' $most_cpu
    ! has start || judge "mpirun to the end of the first step, 8 ranks minus one, s" "$(calc "$(value start 8 3) - $(value start 1 3)")" '<=' $most_start_s
}
json() {
    local a s=
    printf '{"hardware": "%s", "folding": [' "$header"
    ! has folding || for a in $cases; do
        printf '%s\n  {"axis": "%s", "what": "%s", "free_step_s": %s, "bytes_per_step": %s, "rate_mbit": %s, "step_on_s": %s, "step_off_s": %s, "exposed_on_s": %s, "exposed_off_s": %s}' \
            "$s" "$a" "${what_of[$a]}" "$(value free "$a" 3)" "$(value free "$a" 4)" "$(value free "$a" 5)" "$(value on "$a" 3)" "$(value off "$a" 3)" \
            "$(value on "$a" 4)" "$(value off "$a" 4)"
        s=,
    done
    printf '\n]'
    ! has cpu || printf ',\n"cpu_s_per_step": {"one_rank": %s, "eight_ranks": %s, "one_rank_system": %s, "eight_ranks_system": %s}' \
        "$(value cpu one 3)" "$(value cpu eight 3)" "$(value cpu one 4)" "$(value cpu eight 4)"
    ! has start || printf ',\n"start_to_first_step_s": {"one_rank": %s, "eight_ranks": %s}' "$(value start 1 3)" "$(value start 8 3)"
    printf '}\n'
}
markdown() {
    echo "# Folding of communication, $(date +%F)"
    printf '\n%s\n\n' "$header"
    if has folding; then
        folding_table
        echo
        for a in $cases; do echo "- $a: ${what_of[$a]}"; done
        echo
    fi
    # shellcheck disable=SC2016  # a code block
    printf '```\n%s\n```\n\n' "$(cat "$work/verdicts")"
    ! has cpu || printf 'CPU seconds per step (12 layers, hidden 768, sequence 512, global batch 16, bf16): one rank %.3g, 8 ranks (tp 2, pp 2, dp 2) %.3g; in the system %.2g and %.2g.\n' \
        "$(value cpu one 3)" "$(value cpu eight 3)" "$(value cpu one 4)" "$(value cpu eight 4)"
    ! has start || printf 'mpirun to the end of the first step (4 layers, hidden 128): one rank %.2f s, 8 ranks %.2f s.\n' "$(value start 1 3)" "$(value start 8 3)"
    ! has folding || cat <<TEXT

Four network namespaces with one rank each share the CPUs (CPUS=$cpus). The rate makes communication take $load times as long as the step without a
limit. exposed: seconds of the step in which compute waited for that axis, of the slowest rank; for pp without the bubble of the schedule.
Made by \`scripts/bench_folding.sh\`: medians over $rounds rounds in turn (on, off, on, off), $steps steps each after $warmup of warm-up.
TEXT
}
commit=$(git rev-parse --short HEAD 2>/dev/null || echo none)
[ -z "$(git status --porcelain 2>/dev/null)" ] || commit="$commit with changes"
header="$(lscpu | sed -n 's/^Model name: *//p' | head -n 1), $(nproc) cores, Linux $(uname -r); load average at the start $load_average; commit $commit"
verdicts >"$work/verdicts"
missed=$(grep -c MISSED "$work/verdicts" || true)
markdown >"$work/report.md"
cat "$work/report.md"
if [ $quick = no ]; then
    mkdir -p "$(dirname "$out")"
    cp "$work/report.md" "$out.md"
    json >"$out.json"
    say "written: $out.md and .json"
fi
[ "$missed" -eq 0 ] || { say "bench_folding: $missed bars were missed, see MISSED above"; exit 1; }

#!/usr/bin/env bash
# test/drills/kill_resume.sh TRIFOLD [KILLS] [SEED]   kill -9 at random moments of a run that saves every step.
# After each kill the run must go on from the newest complete checkpoint, and in the end its weights must be those of a run
# that nobody disturbed, bit for bit. A run that ends before all kills are spent is compared, and a new one is started.
set -euo pipefail
trifold=$(realpath "${1:-build/trifold}")
kills=${2:-100}
RANDOM=${3:-20240520}
steps=40
work=$(mktemp -d)
pid=
trap '[ -z "$pid" ] || kill -9 "$pid" 2>/dev/null || true; rm -rf "$work"' EXIT
die() { echo "kill_resume: $*" >&2; exit 1; }

# 4 KiB of letters are enough data; the byte tokenizer needs no file.
for _ in $(seq 512); do printf '%08x' $((RANDOM * RANDOM)); done >"$work/text.txt"
"$trifold" data tokenize "$work/text.txt" --out "$work/text" --format llmc >"$work/log" 2>&1 || die "tokenize: $(tail -n 1 "$work/log")"

start() {  # start RUN: in the background, sets pid
    "$trifold" train --model.layers=2 --model.hidden=32 --model.heads=2 --model.vocab=257 --model.max_seq=16 --train.seq=16 \
        --train.micro_batch=2 --train.dtype=fp32 --train.steps=$steps --data.train="$work/text.bin" --checkpoint.every=1 \
        --checkpoint.keep=2 --run.threads=1 --run.tensorboard=off --run.dir="$work/$1" --debug.dump_params="$work/$1.params" \
        >"$work/out" 2>"$work/err" &
    pid=$!
}
# Sets code. Bash reports killed jobs on standard error.
finish() { { wait "$pid" && code=0 || code=$?; } 2>/dev/null; pid=; }
now_ms() { echo $(($(date +%s%N) / 1000000)); }
newest_complete() {  # newest_complete RUN: step of the newest checkpoint that has its final name, 0 without any
    find "$work/$1/checkpoints" -maxdepth 1 -regex '.*/step-[0-9]+' -printf '%f\n' 2>/dev/null | sed 's/^step-0*//' | sort -n | tail -n 1 | grep . || echo 0
}
leftovers() { find "$work/$1/checkpoints" \( -name '*.tmp' -o -name '*.deleting' -o -name '*.replaced' \) 2>/dev/null | wc -l; }
first_step() { sed -n "\|^ *[0-9]*/$steps |{s|^ *\([0-9]*\)/.*|\1|p;q}" "$work/out"; }  # of the last start; empty when it made none

begin=$(now_ms)
start undisturbed
finish
[ "$code" -eq 0 ] || die "the undisturbed run ended with exit code $code: $(tail -n 1 "$work/err")"
whole_ms=$(($(now_ms) - begin))

killed=0 round=1 half_written=0 before_step=0 resumed=0
while true; do
    run=run-$round
    complete=$(newest_complete "$run")
    start "$run"
    if [ "$killed" -lt "$kills" ]; then
        # Any moment of a whole run: while it starts, loads, or in one of its steps.
        delay_ms=$(((whole_ms + 20) * RANDOM / 32768))
        sleep "$(printf '%d.%03d' $((delay_ms / 1000)) $((delay_ms % 1000)))"
        kill -9 "$pid" 2>/dev/null || true
    fi
    finish
    step=$(first_step)
    if [ -n "$step" ]; then
        [ "$step" -eq $((complete + 1)) ] || die "kill $killed: the newest complete checkpoint was of step $complete, but the run went on at step $step"
        [ "$complete" -eq 0 ] || resumed=$((resumed + 1))
    elif [ "$code" -eq 137 ]; then
        before_step=$((before_step + 1))
    fi
    if [ "$code" -eq 137 ]; then
        killed=$((killed + 1))
        [ "$(leftovers "$run")" -eq 0 ] || half_written=$((half_written + 1))
        after=$(newest_complete "$run")
        [ "$after" -ge "$complete" ] || die "kill $killed: the newest complete checkpoint went back from step $complete to $after"
        continue
    fi
    [ "$code" -eq 0 ] || die "after $killed kills the run ended with exit code $code: $(tail -n 1 "$work/err")"
    [ "$(leftovers "$run")" -eq 0 ] || die "leftovers of half-written checkpoints stayed: $(ls "$work/$run/checkpoints")"
    cmp "$work/undisturbed.params" "$work/$run.params" || die "round $round: the final weights differ from those of the undisturbed run"
    [ "$killed" -lt "$kills" ] || break
    round=$((round + 1))
done
[ "$resumed" -gt 0 ] && [ "$half_written" -gt 0 ] ||
    die "the drill proves nothing: $resumed times resumed, $half_written times a checkpoint was half-written when the kill came"
echo "$killed kills in $round runs: $before_step before the first step, $half_written during a save, $resumed times resumed; final weights equal"

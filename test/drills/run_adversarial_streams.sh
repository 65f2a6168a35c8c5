#!/usr/bin/env bash
# test/drills/run_adversarial_streams.sh TRIFOLD   A run with evaluation, background checkpoints and accumulation whose operations run as late as
# their declared order allows: no access may be unordered, and the weights must be those of the ordinary run, bit for bit.
set -euo pipefail
trifold=$(realpath "${1:-build/trifold}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
die() { echo "adversarial_streams: $*" >&2; exit 1; }
RANDOM=11
for _ in $(seq 512); do printf '%08x' $((RANDOM * RANDOM)); done >"$work/text.txt"
"$trifold" data tokenize "$work/text.txt" --out "$work/text" --format llmc >"$work/log" 2>&1 || die "tokenize: $(tail -n 1 "$work/log")"
for streams in normal adversarial; do
    "$trifold" train --run.device=cpu --model.layers=2 --model.hidden=32 --model.heads=2 --model.vocab=257 --model.max_seq=16 --train.seq=16 --train.micro_batch=2 \
        --train.global_batch=6 --train.dtype=bf16 --train.recompute=selective --train.steps=12 --data.train="$work/text.bin" --data.val="$work/text.bin" \
        --data.eval_every=4 --data.eval_batches=3 --checkpoint.every=5 --optim.name=lamb --run.threads=2 --run.tensorboard=off --debug.streams=$streams \
        --run.dir="$work/$streams" --debug.dump_params="$work/$streams.params" >"$work/log" 2>&1 || die "$streams: exit code $?, $(tail -n 3 "$work/log")"
done
cmp "$work/normal.params" "$work/adversarial.params" || die "the weights differ"
grep -q val_loss "$work/adversarial/metrics.jsonl" || die "nothing was evaluated"
echo "12 steps, 3 evaluations: every access ordered, the same bits"

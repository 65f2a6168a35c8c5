#!/usr/bin/env bash
# test/drills/run_emulated_gpu.sh TRIFOLD   The whole program on the emulated GPU (emulated_trifold, beside TRIFOLD) against the CPU: training
# with evaluation and checkpoints, going on with each other's checkpoints, sampling, a NaN step, cuDNN's attention, and what a machine without a GPU says.
set -euo pipefail
trifold=$(realpath "${1:-build/trifold}")
emulated=$(dirname "$trifold")/emulated_trifold
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
die() { echo "emulated_gpu: $*" >&2; exit 1; }

# A machine without a GPU, or a build without CUDA: one sentence, exit code 2, nothing written.
code=0
"$trifold" train --run.device=cuda --model.preset=gpt2-124m --train.steps=1 --data.train="$work/none" --run.dir="$work/none" 2>"$work/err" || code=$?
if ! command -v nvidia-smi >/dev/null; then
    [ $code -eq 2 ] && [ "$(wc -l <"$work/err")" -eq 1 ] && grep -q -- '--run.device=cpu' "$work/err" || die "without a GPU: exit code $code, $(cat "$work/err")"
    [ ! -e "$work/none" ] || die "a run that could not start left files"
fi
[ -x "$emulated" ] || { echo "no emulated build (it needs a CUDA toolkit and clang): only the refusal was tested"; exit 0; }

RANDOM=7
for _ in $(seq 600); do printf '%08x ' $((RANDOM * RANDOM)); done >"$work/text.txt"
"$emulated" data tokenize "$work/text.txt" --out "$work/text" --format llmc >"$work/log" 2>&1 || die "tokenize: $(tail -n 1 "$work/log")"
model=(--model.layers=2 --model.hidden=64 --model.heads=2 --model.kv_heads=1 --model.head_dim=64 --model.vocab=257 --model.max_seq=32 --model.position=rope
    --model.activation=swiglu --model.norm=rmsnorm --model.bias=none)
train() {  # train RUN DEVICE OPTIONS...
    "$emulated" train --run.device="$2" "${model[@]}" --train.seq=32 --train.micro_batch=1 --train.global_batch=2 --train.dtype=fp32 --train.steps=20 --optim.eps=1e-5 \
        --data.train="$work/text.bin" --data.val="$work/text.bin" --data.eval_every=10 --data.eval_batches=2 --checkpoint.every=8 --run.threads=2 --run.tensorboard=off \
        --run.dir="$work/$1" "${@:3}" >"$work/$1.out" 2>"$work/$1.err" || die "$1 ended with exit code $?: $(tail -n 3 "$work/$1.err")"
}
field() { sed -n "s/.*\"$1\": *\(-\{0,1\}[0-9.][0-9.e+-]*\).*/\1/p" "$2"; }
# same RUN RUN KEY BOUND: relative differences of a value in all lines of both logs.
same() {
    paste <(field "$3" "$work/$1/metrics.jsonl") <(field "$3" "$work/$2/metrics.jsonl") | awk -v bound="$4" '
        { d = ($1 - $2) / $2; if (d < 0) d = -d; if (d > worst) worst = d; ++n } END { exit !(n >= 2 && worst <= bound) }' ||
        die "$3 of $1 and $2 differ by more than $4: $(paste <(field "$3" "$work/$1/metrics.jsonl") <(field "$3" "$work/$2/metrics.jsonl") | tail -n 3)"
}
train cpu cpu
train gpu cuda --run.trace=on
[ "$(field loss "$work/gpu/metrics.jsonl" | wc -l)" -eq 20 ] || die "the log of the GPU run has not 20 steps"
same gpu cpu loss 1e-5
same gpu cpu val_loss 1e-5
same gpu cpu grad_norm 1e-4
grep -q '"attention_backward"' "$work/gpu/trace/rank-00000.json" || die "the timeline of the GPU run shows no operations"

# Each goes on with the other's checkpoint of step 8, and ends where the whole run ended.
rm -rf "$work"/cpu/checkpoints/step-0000001* "$work"/gpu/checkpoints/step-0000001* "$work"/cpu/checkpoints/step-0000002* "$work"/gpu/checkpoints/step-0000002*
train gpu-from-cpu cuda --checkpoint.resume="$work/cpu"
train cpu-from-gpu cpu --checkpoint.resume="$work/gpu"
for run in gpu-from-cpu cpu-from-gpu; do
    [ "$(field loss "$work/$run/metrics.jsonl" | wc -l)" -eq 12 ] || die "$run did not go on at step 9"
    [ "$(field val_loss "$work/$run/metrics.jsonl" | tail -n 1 | cut -c1-6)" = "$(field val_loss "$work/gpu/metrics.jsonl" | tail -n 1 | cut -c1-6)" ] || die "$run ends elsewhere"
done

# Greedy samples, prompt and cache included, are the same text.
sample() { "$emulated" sample --run.device="$1" --checkpoint="$work/cpu" --prompt="00" --tokens=12 --temperature=0 2>"$work/err" || die "sample: $(cat "$work/err")"; }
[ "$(sample cpu)" = "$(sample cuda)" ] || die "greedy samples differ: $(sample cpu) and $(sample cuda)"

# A NaN gradient on the device: the step is skipped and counted, the run goes on.
train nan cuda --inject=kind=nan,step=3
grep -q '"skipped_step"' "$work/nan/events.jsonl" || die "a NaN gradient on the device was not skipped"

# With the emulated cuDNN: a resumed run has the bits of the whole one, its checkpoint is sampled anywhere, and a trial says what it found.
half=(--train.dtype=bf16 --data.eval_every=0 --checkpoint.every=3 --optim.decay_steps=6 --run.attention=cudnn)
export EMULATION_CUDNN=1
attention() { grep -m 1 '^attention' "$work/$1.out"; }
train cudnn-whole cuda "${half[@]}" --train.steps=6 --debug.dump_params="$work/cudnn.whole"
train cudnn-cut cuda "${half[@]}" --train.steps=3
train cudnn-cut cuda "${half[@]}" --train.steps=6 --debug.dump_params="$work/cudnn.cut"
cmp "$work/cudnn.whole" "$work/cudnn.cut" || die "a resumed run with cuDNN's attention has other weights"
train own cuda "${half[@]}" --run.attention=own --train.steps=6 --debug.dump_params="$work/own.whole"
! cmp -s "$work/cudnn.whole" "$work/own.whole" || die "cuDNN's attention and ours gave the same bits: one of them was not there"
[[ $(attention cudnn-whole) == *"cuDNN emulated" && $(attention own) == *"our own" ]] || die "said: $(attention cudnn-whole), $(attention own)"
"$trifold" sample --run.device=cpu --checkpoint="$work/cudnn-whole" --prompt=00 --tokens=4 --temperature=0 >/dev/null 2>"$work/err" || die "sampled on a CPU: $(cat "$work/err")"
train trial cuda "${half[@]}" --run.attention=auto --run.deterministic=off --train.steps=1
[[ $(attention trial) == *" times as fast"* ]] || die "the trial said: $(attention trial)"
train repeats cuda "${half[@]}" --run.attention=auto --train.steps=1
[[ $(attention repeats) == *"our own" ]] || die "a run that repeats its bits tried cuDNN: $(attention repeats)"
EMULATION_CUDNN=0 train absent cuda "${half[@]}" --run.attention=auto --run.deterministic=off --train.steps=1
[[ $(attention absent) == *"our own: the emulated cuDNN is off"* ]] || die "without cuDNN: $(attention absent)"
echo "20 steps, resume both ways, samples and a skipped step agree with the CPU; cuDNN's attention resumes with the same bits"

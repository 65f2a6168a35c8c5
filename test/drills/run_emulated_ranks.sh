#!/usr/bin/env bash
# test/drills/run_emulated_ranks.sh TRIFOLD   Several ranks, each with an emulated GPU (emulated_trifold, beside TRIFOLD), which send through
# host memory: gradients of every parameter and ten steps in several layouts, against one rank on a CPU; and a checkpoint that goes on elsewhere.
set -euo pipefail
. "$(dirname "$0")/ranks.sh"
emulated=$(dirname "$trifold")/emulated_trifold
[ -x "$emulated" ] || { echo "skipped: no emulated build (it needs a CUDA toolkit and clang)"; exit 0; }
tokens text 11

gpt=(--model.layers=4 --model.hidden=128 --model.heads=2 --model.tied=on)
llama=(--model.layers=4 --model.hidden=128 --model.heads=2 --model.kv_heads=2 --model.norm=rmsnorm --model.position=rope --model.activation=swiglu
    --model.ffn_hidden=96 --model.bias=none --model.tied=off)
train() {  # train RUN RANKS MODEL DEVICE OPTIONS...
    local -n model=$3
    on_ranks "$2" "$emulated" train --run.device="$4" --run.comm=host "${model[@]}" --model.vocab=257 --model.max_seq=16 --train.dtype=fp32 --train.global_batch=4 \
        --train.steps="${steps:-10}" --optim.lr=3e-3 --optim.eps=1e-5 --data.train="$work/text.bin" --run.threads=1 --run.tensorboard=off --run.dir="$work/$1" \
        --debug.dump_grads="$work/$1.grads" "${@:5}" >"$work/$1.out" 2>"$work/$1.err" </dev/null || die "$1 on $2 ranks ended with exit code $?: $(tail -n 3 "$work/$1.err")"
    [ ! -s "$work/$1.err" ] || die "$1 on $2 ranks wrote to standard error: $(head -n 3 "$work/$1.err")"
}
layouts=0
layout() {  # layout MODEL RANKS OPTIONS...
    layouts=$((layouts + 1))
    local run=layout-$layouts about="$1 on $2 GPUs, ${*:3}"
    train "$run" "$2" "$1" cuda "${@:3}"
    grep -q "emulated H200" "$work/$run.out" || die "$about: it did not compute on the emulated GPU"
    asks "$about" tensors "$work/$1.grads" "$work/$run.grads" 1e-5
    asks "$about" metrics "$work/$1/metrics.jsonl" "$work/$run/metrics.jsonl" 1e-5 loss
    asks "$about" metrics "$work/$1/metrics.jsonl" "$work/$run/metrics.jsonl" 1e-4 grad_norm
}

train gpt 1 gpt cpu
layout gpt 2 --mesh.dp=2 --optim.zero=1 --run.trace=on
asks "the timeline of rank 1" trace "$work/layout-1/trace/rank-00001.json" compute dp
layout gpt 2 --mesh.tp=2 --overlap.tp_chunks=2 --train.recompute=selective
layout gpt 4 --mesh.pp=4 --mesh.schedule=zero_bubble
layout gpt 4 --mesh.pp=2 --mesh.virtual_stages=2
train llama 1 llama cpu --checkpoint.every=5
layout llama 2 --mesh.dp=2 --optim.zero=2
layout llama 8 --mesh.tp=2 --mesh.pp=2 --train.recompute=full

# From step 5 of the CPU's run on two GPUs, to the same end.
rm -rf "$work"/llama/checkpoints/step-00000010
train resumed 2 llama cuda --mesh.tp=2 --checkpoint.resume="$work/llama"
[ "$(grep -c '"loss"' "$work/resumed/metrics.jsonl")" -eq 5 ] || die "the run on GPUs did not go on at step 6"
tail -n 5 "$work/llama/metrics.jsonl" >"$work/end.jsonl"
asks "resumed on GPUs" metrics "$work/end.jsonl" "$work/resumed/metrics.jsonl" 1e-5 loss
echo "$layouts layouts on up to 8 emulated GPUs agree with one CPU, and so does a run that went on there"

#!/usr/bin/env bash
# test/drills/run_layouts.sh TRIFOLD   The executable under mpirun in many layouts, against one rank: gradients of every parameter, ten steps,
# validation whose last round leaves ranks without a batch; and what every layout writes: timelines, exposed seconds.
set -euo pipefail
. "$(dirname "$0")/ranks.sh"
tokens text 11
tokens val 12

gpt=(--model.layers=4 --model.hidden=32 --model.heads=4 --model.tied=on)
llama=(--model.layers=4 --model.hidden=32 --model.heads=4 --model.kv_heads=2 --model.norm=rmsnorm --model.position=rope --model.activation=swiglu
    --model.ffn_hidden=96 --model.bias=none --model.tied=off)
train() {  # train RUN RANKS MODEL OPTIONS...
    local -n model=$3
    on_ranks "$2" "$trifold" train --run.device=cpu "${model[@]}" --model.vocab=257 --model.max_seq=16 --train.dtype=fp32 --train.global_batch=8 --train.steps=10 \
        --optim.lr=3e-3 --optim.eps=1e-5 --data.train="$work/text.bin" --data.val="$work/val.bin" --data.eval_every=5 --data.eval_batches=3 --run.threads=1 \
        --run.tensorboard=off --run.dir="$work/$1" --debug.dump_grads="$work/$1.grads" "${@:4}" >"$work/$1.out" 2>"$work/$1.err" </dev/null ||
        die "$1 on $2 ranks ended with exit code $?: $(tail -n 3 "$work/$1.err")"
    [ ! -s "$work/$1.err" ] || die "$1 on $2 ranks wrote to standard error: $(head -n 3 "$work/$1.err")"
}
layouts=0
layout() {  # layout MODEL RANKS OPTIONS...
    layouts=$((layouts + 1))
    local run=layout-$layouts about="$1 on $2 ranks, ${*:3}"
    train "$run" "$2" "$1" "${@:3}"
    asks "$about" tensors "$work/$1.grads" "$work/$run.grads" 1e-5
    asks "$about" metrics "$work/$1/metrics.jsonl" "$work/$run/metrics.jsonl" 1e-5 loss grad_norm
    asks "$about" metrics "$work/$1/metrics.jsonl" "$work/$run/metrics.jsonl" 1e-6 val_loss
    asks "$about" fields "$work/$run/metrics.jsonl" /exposed_s/dp /exposed_s/tp /exposed_s/pp /exposed_s/ep /exposed_s/cp /bubble_s /mem_bytes
}
timelines() {  # timelines RANKS TRACK...: of the layout before, on every rank
    local r dir=$work/layout-$layouts/trace
    [ "$(ls "$dir" | wc -l)" -eq "$1" ] || die "not one timeline for each of $1 ranks: $(ls "$dir")"
    for ((r = 0; r < $1; r++)); do asks "the timeline of rank $r" trace "$(printf '%s/rank-%05d.json' "$dir" "$r")" compute "${@:2}"; done
}

train gpt 1 gpt
layout gpt 2 --mesh.dp=2 --optim.zero=0
layout gpt 4 --mesh.tp=4 --overlap.tp_chunks=2
layout gpt 2 --mesh.pp=2 --train.recompute=selective
layout gpt 4 --mesh.pp=4 --mesh.schedule=zero_bubble
layout gpt 4 --mesh.pp=2 --mesh.virtual_stages=2
layout gpt 8 --mesh.tp=2 --mesh.pp=2 --run.trace=on
timelines 8 tp dp pp tie
train llama 1 llama
layout llama 8 --mesh.dp=8 --optim.zero=2 --run.trace=on
timelines 8 dp
layout llama 2 --mesh.tp=2 --train.recompute=full --overlap.tp=off
layout llama 4 --mesh.dp=2 --mesh.pp=2 --mesh.layers_per_stage=3,1
layout llama 8 --mesh.tp=2 --mesh.pp=4 --mesh.schedule=zero_bubble

# A wrong answer must be noticed.
"$compare" metrics "$work/gpt/metrics.jsonl" "$work/llama/metrics.jsonl" 1e-5 loss >"$work/answer" && die "losses of two models are taken for the same"
train other 2 gpt --mesh.dp=2 --train.seed=5
"$compare" tensors "$work/gpt.grads" "$work/other.grads" 1e-5 >"$work/answer" && die "gradients of two seeds are taken for the same"
"$compare" trace "$work/layout-1/metrics.jsonl" compute >"$work/answer" 2>&1 && die "a log is taken for a timeline"
echo "$layouts layouts on up to 8 ranks agree with one rank"

#!/usr/bin/env bash
# test/golden/run_golden.sh TRIFOLD   Trains the tiny models of test/golden/hf and compares with Hugging Face transformers:
# loss 1e-5, every gradient 1e-4, parameters after 10 AdamW steps 1e-4 (compare.cpp says how). Prints one line per family
# with the worst values. Also:
#   recompute selective, full     the same bits as none
#   micro_batch 1                 within the same bars (gradients accumulated over two micro-batches)
#   llama-sharded                 the same bits as llama (index of shards, config.json of transformers 4)
#   bf16                          20 steps near those of fp32, and falling
#   altered expectations          must be refused, else this test could not fail
set -euo pipefail
trifold=$(realpath "${1:-build/trifold}")
compare=$(dirname "$trifold")/golden_compare
cd "$(dirname "$0")/hf"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0
wrong() { echo "  FAILED: $*"; failed=1; }

# train NAME MODEL DATA OPTIONS...   into $work/NAME; settings and tokens are those of the family DATA.
train() {
    local name=$1 model=$2 data=$3
    shift 3
    mkdir -p "$work/$name"
    "$trifold" train --config "$data/train.json" --init.from="$model" --data.train="$data/tokens.bin" --run.dir="$work/$name/run" \
        --run.tensorboard=off --run.threads=1 --debug.dump_grads="$work/$name/grads" --debug.dump_params="$work/$name/params" "$@" \
        >"$work/$name/log" 2>&1 && return
    wrong "$name: trifold train ended with exit code $?"
    tail -n 5 "$work/$name/log"
    return 1
}
metrics() { echo "$work/$1/run/metrics.jsonl"; }
check() { "$compare" check "$2" "$work/$1/grads" "$work/$1/params" "$(metrics "$1")"; }  # check NAME EXPECTED
same_bits() {                                                                            # same_bits A B
    cmp "$work/$1/grads" "$work/$2/grads" && cmp "$work/$1/params" "$work/$2/params" || wrong "$2 differs from $1"
}

sed -n 's/^ *"\([^"]*\/[^"]*\)": "\([0-9a-f]\{64\}\)",\{0,1\}$/\2  \1/p' golden.json >"$work/sums"
[ -s "$work/sums" ] && sha256sum --quiet --strict -c "$work/sums" || wrong "files differ from golden.json"

for family in gpt2 llama mistral qwen2; do
    train "$family" "$family" "$family" || continue
    printf '%-8s ' "$family"
    check "$family" "$family/expected.safetensors" || failed=1
    for recompute in selective full; do
        train "$family-$recompute" "$family" "$family" --train.recompute=$recompute && same_bits "$family" "$family-$recompute"
    done
    if train "$family-micro" "$family" "$family" --train.micro_batch=1; then
        check "$family-micro" "$family/expected.safetensors" >"$work/out" || { wrong "micro_batch 1: $(cat "$work/out")"; }
    fi
    printf '%-8s ' "  bf16"
    train "$family-fp32" "$family" "$family" --train.steps=20 --optim.lr=3e-3 &&
        train "$family-bf16" "$family" "$family" --train.steps=20 --optim.lr=3e-3 --train.dtype=bf16 &&
        { "$compare" losses "$(metrics "$family-fp32")" "$(metrics "$family-bf16")" || failed=1; }
done
train llama-sharded llama-sharded llama && same_bits llama llama-sharded

for prefix in losses grad_norms grad/model.layers.1.self_attn.k_proj grad/model.norm param/model.layers.0.mlp.down_proj \
    param/model.layers.1.input_layernorm; do
    "$compare" alter llama/expected.safetensors "$work/altered" $prefix
    "$compare" check "$work/altered" "$work/llama/grads" "$work/llama/params" "$(metrics llama)" >"$work/out" 2>&1 && code=0 || code=$?
    [ $code -eq 1 ] && grep -q FAILED "$work/out" || wrong "an altered $prefix was not noticed"
done

[ $failed -eq 0 ] && echo "golden files: 4 families agree with transformers"
exit $failed

#!/usr/bin/env bash
# test/drills/run_resume_layouts.sh TRIFOLD   A checkpoint of one layout goes on in another: steps 5 to 8 as if nobody had stopped, for pairs of layouts;
# a rank that is killed during a background save; exports of checkpoints that 8 ranks wrote.
set -euo pipefail
. "$(dirname "$0")/ranks.sh"
tokens text 31

options=(train --run.device=cpu --model.layers=4 --model.hidden=32 --model.heads=4 --model.kv_heads=2 --model.norm=rmsnorm --model.position=rope --model.activation=swiglu
    --model.ffn_hidden=96 --model.bias=none --model.tied=on --model.vocab=257 --model.max_seq=16 --train.dtype=fp32 --train.global_batch=8 --optim.lr=3e-3 --optim.eps=1e-5
    --optim.schedule=constant --data.train="$work/text.bin" --run.threads=1 --run.tensorboard=off)
train() {  # train RUN RANKS STEPS OPTIONS...
    on_ranks "$2" "$trifold" "${options[@]}" --run.dir="$work/$1" --train.steps="$3" "${@:4}" >"$work/$1.out" 2>"$work/$1.err" </dev/null ||
        die "$1 on $2 ranks, ${*:4}, ended with exit code $?: $(grep trifold "$work/$1.err" | head -n 3)"
}
# saved NAME RANKS OPTIONS...: $work/NAME stands at step 4, saved while step 5 was on its way
saved() {
    train "$1" "$2" 5 --checkpoint.every=4 "${@:3}"
    rm -r "$work/$1/checkpoints/step-00000005"
    [ -f "$work/$1/checkpoints/step-00000004/manifest.json" ] || die "$1 saved nothing at step 4"
}
pairs=0
# goes_on FROM WHOLE BOUND RANKS OPTIONS...: a copy of run FROM goes on in another layout and ends as run WHOLE
goes_on() {
    pairs=$((pairs + 1))
    local run=pair-$pairs about="$1 on $4 ranks, ${*:5}"
    cp -r "$work/$1" "$work/$run"
    train "$run" "$4" 8 "${@:5}"
    grep -q '"kind":"resume","step":4' "$work/$run/events.jsonl" || die "$about: did not resume at step 4"
    asks "$about" metrics "$work/$2/metrics.jsonl" "$work/$run/metrics.jsonl" "$3" loss grad_norm
}

train whole 1 8
saved one 1
saved tp-pp 8 --mesh.tp=2 --mesh.pp=2 --checkpoint.async=off
saved dp8 8 --mesh.dp=8 --optim.zero=2
saved virtual 4 --mesh.pp=2 --mesh.virtual_stages=2
saved bubble 4 --mesh.pp=4 --mesh.schedule=zero_bubble --optim.zero=0
goes_on one     whole 1e-5 8 --mesh.tp=2 --mesh.pp=2 --mesh.schedule=zero_bubble
goes_on one     whole 1e-5 4 --mesh.dp=4 --optim.zero=0
goes_on tp-pp   whole 1e-5 1 --train.micro_batch=2
goes_on tp-pp   whole 1e-5 4 --mesh.pp=4
goes_on dp8     whole 1e-5 2 --mesh.tp=2
goes_on dp8     whole 1e-5 2 --mesh.dp=2 --train.micro_batch=4 --checkpoint.async=off
goes_on virtual whole 1e-5 8 --mesh.dp=8
goes_on bubble  whole 1e-5 1
goes_on bubble  whole 1e-5 4 --mesh.tp=2 --optim.zero=2

lamb=(--optim.name=lamb)
train whole-lamb 1 8 "${lamb[@]}"
saved lamb 4 --mesh.tp=2 --mesh.pp=2 "${lamb[@]}"
goes_on lamb whole-lamb 1e-5 8 --mesh.dp=8 "${lamb[@]}"
# Twice: 4 ranks, 8, then 2 for the last steps.
goes_on lamb whole-lamb 1e-5 2 --mesh.pp=2 --checkpoint.every=6 "${lamb[@]}"
again=pair-$pairs
rm -r "$work/$again/checkpoints/step-00000008"
train $again 4 8 --mesh.dp=2 --mesh.tp=2 "${lamb[@]}"
grep -q '"kind":"resume","step":6' "$work/$again/events.jsonl" || die "the second time did not resume at step 6"
asks "resumed twice" metrics "$work/whole-lamb/metrics.jsonl" "$work/$again/metrics.jsonl" 1e-5 loss grad_norm

bf16=(--train.dtype=bf16)
train whole-bf16 1 8 "${bf16[@]}"
saved bf16 4 --mesh.tp=2 --mesh.pp=2 "${bf16[@]}"
goes_on bf16 whole-bf16 5e-3 2 --mesh.dp=2 "${bf16[@]}"

# The same layout: the same bits.
train whole-tp-pp 8 8 --mesh.tp=2 --mesh.pp=2 --debug.dump_params="$work/whole-tp-pp.params"
goes_on tp-pp whole-tp-pp 0 8 --mesh.tp=2 --mesh.pp=2 --debug.dump_params="$work/again.params"
cmp "$work/whole-tp-pp.params" "$work/again.params" || die "the same layout does not repeat the bits"

# ---------------------------------------------------------------- other samples, other model
sed -n '/"global_batch"/p' "$work/one/config.json" | grep -q 8 || die "the resolved configuration does not say the global batch"
cp -r "$work/tp-pp" "$work/refused"
code=0
on_ranks 2 "$trifold" "${options[@]}" --run.dir="$work/refused" --train.steps=8 --train.global_batch=6 >"$work/out" 2>"$work/err" </dev/null || code=$?
[ $code -eq 4 ] && [ "$(grep -c 'trifold: .*stands at sample 32.*global_batch=6' "$work/err")" -eq 1 ] || die "a batch that does not fit the position: exit code $code, $(cat "$work/err")"

# ---------------------------------------------------------------- a rank dies during a background save
cat >"$work/rank" <<'WRAPPER'
#!/usr/bin/env bash
echo $$ >"$1.$OMPI_COMM_WORLD_RANK"
exec "${@:2}"
WRAPPER
chmod +x "$work/rank"
half=0
for attempt in $(seq 30); do
    rm -rf "$work/killed"
    mpirun --oversubscribe --bind-to none -n 4 "$work/rank" "$work/pid" "$trifold" "${options[@]}" --run.dir="$work/killed" --train.steps=1000000 --run.log_every=1000000 \
        --mesh.tp=2 --checkpoint.every=1 --checkpoint.keep=2 >"$work/out" 2>"$work/err" </dev/null &
    launcher=$!
    started+=($launcher)
    for _ in $(seq 2000); do
        ls -d "$work"/killed/checkpoints/step-*[2-9].tmp >/dev/null 2>&1 && break
        sleep 0.005
    done
    # Stopped first, so that the others wait for its part of the checkpoint, if it still owes one.
    victim=$(cat "$work/pid.$((attempt % 4))")
    kill -STOP "$victim"
    sleep 0.2
    waiting=$({ find "$work/killed/checkpoints" -maxdepth 1 -name '*.tmp' 2>/dev/null || true; } | wc -l)
    kill -9 "$victim"
    code=0
    { wait $launcher || code=$?; } 2>/dev/null
    [ $code -eq 137 ] || [ $code -eq 75 ] || die "a rank was killed, but mpirun ended with $code: $(cat "$work/err")"
    [ "$(grep -c 'trifold: ' "$work/err")" -eq 1 ] || die "not one sentence about the killed rank: $(cat "$work/err")"
    ! grep -q 'terminate called' "$work/err" || die "a rank crashed: $(cat "$work/err")"
    half=$((half + waiting))
    newest=$(find "$work/killed/checkpoints" -maxdepth 1 -regex '.*/step-[0-9]+' -printf '%f\n' | sort | tail -n 1)
    newest=$((10#${newest#step-}))
    train killed 2 $((newest + 2)) --mesh.pp=2
    grep -q "\"kind\":\"resume\",\"step\":$newest" "$work/killed/events.jsonl" || die "after a kill during the save the run did not go on at step $newest"
    [ -z "$(find "$work/killed/checkpoints" -name '*.tmp' -o -name '*.deleting' -o -name '*.replaced')" ] || die "leftovers stay: $(ls "$work/killed/checkpoints")"
    [ $half -lt 1 ] || break
done
[ $half -gt 0 ] || die "the drill proves nothing: no kill came during a save"

# ---------------------------------------------------------------- export
# What 8 ranks wrote, and the same weights written by one rank.
"$trifold" export "$work/tp-pp/checkpoints/step-00000004" --to "$work/hf-8" --format hf >"$work/out" 2>"$work/err" || die "export: $(cat "$work/err")"
cp -r "$work/tp-pp" "$work/rewritten"
mv "$work/rewritten/checkpoints" "$work/rewritten/from"
train rewritten 1 4 --checkpoint.resume="$work/rewritten/from/step-00000004"
[ "$(ls "$work"/rewritten/checkpoints/step-00000004/*.safetensors | wc -l)" -eq 1 ] || die "one rank did not write one file: $(ls "$work/rewritten/checkpoints/step-00000004")"
"$trifold" export "$work/rewritten/checkpoints/step-00000004" --to "$work/hf-1" --format hf >"$work/out" 2>"$work/err" || die "export: $(cat "$work/err")"
diff -r "$work/hf-8" "$work/hf-1" >"$work/out" || die "exports differ: $(head -n 3 "$work/out")"

echo "$pairs pairs of layouts go on as one run, $half kills during a save lose nothing, exports are equal"

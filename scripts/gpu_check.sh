#!/usr/bin/env bash
# scripts/gpu_check.sh [options]   Everything that needs a real GPU, in one go of at most 8 minutes: is it right, is it clean, is it fast.
#
#   --pack DIR       no GPU needed: builds programs that need nothing but the CUDA toolkit's libraries (oneDNN left out, our other
#                    libraries linked statically, stripped) into DIR, for a machine that has neither our libraries nor time to build
#   --programs DIR   uses the programs in DIR (made by --pack, or a build folder) instead of building
#   --rehearse DIR   plays the script through in an emulated build (DIR is a build folder): what is right, without speeds
#   --out DIR        where results go [docs/measured]    --seconds N   budget; what does not fit is skipped and said [460]
#
#   1 parity         every operation against the CPU at odd and at real shapes; the tiny model 20 steps against the CPU
#   2 sanitizer      compute-sanitizer memcheck and racecheck on the small tests, where it is installed
#   3 repeatability  the same seed twice gives the same weights, bit for bit
#   4 ranks          layouts of several ranks that share this GPU (--run.comm=host) against one rank: loss and gradient norm of each step
#   5 operations     each one's share of the copy bandwidth or matrix rate that was measured in the same run
#   6 training       tokens/s, MFU and memory: GPT-2 124M, GPT-3 1.3B, a slice of Llama-3 8B; PyTorch (compiled) beside it where it is installed
#
# Prints one table, writes DATE-gpu.md and DATE-gpu.json. Exit code 1 when a number is wrong; slow is reported, not an error.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
. scripts/measure.sh

pack= programs= rehearse= out=docs/measured seconds=460
while [ $# -gt 0 ]; do
    case $1 in
        --pack | --programs | --rehearse | --out | --seconds) [ $# -ge 2 ] || { echo "gpu_check: $1 needs a value" >&2; exit 2; }; printf -v "${1#--}" %s "$2"; shift ;;
        *) echo "gpu_check: unknown option $1" >&2; exit 2 ;;
    esac
    shift
done
say() { echo "== $*"; }

build() {  # build FOLDER FLAGS...
    cmake -S . -B "$1" -DCMAKE_BUILD_TYPE=Release -DTRIFOLD_CUDA=on ${ARCHS:+"-DTRIFOLD_ARCHS=${ARCHS// /;}"} "${@:2}" >"$1.log" 2>&1 && cmake --build "$1" -j "$(nproc)" --target trifold gpu_tests bench_gpu >>"$1.log" 2>&1 ||
        { tail -n 20 "$1.log" >&2; echo "gpu_check: the build failed, see $1.log" >&2; exit 1; }
}
if [ -n "$pack" ]; then
    scripts/install_cudnn_frontend.sh || echo "gpu_check: packed without cuDNN's attention" >&2
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    build "$work/build" -DTRIFOLD_BUNDLE=on
    mkdir -p "$pack"
    for program in trifold gpu_tests bench_gpu; do strip -o "$pack/$program" "$work/build/$program"; done
    git rev-parse --short HEAD >"$pack/commit" 2>/dev/null || echo unknown >"$pack/commit"
    du -sh "$pack"
    exit 0
fi

started=$SECONDS
left() { echo $((seconds - (SECONDS - started))); }
work=$(mktemp -d)
pid=
trap '[ -z "$pid" ] || kill -9 "$pid" 2>/dev/null; rm -rf "$work"' EXIT
log=$work/log
device=cuda tests=gpu_tests
if [ -n "$rehearse" ]; then
    export EMULATION_CUDNN=1
    programs=$rehearse tests=emulated_clang trifold=$rehearse/emulated_trifold
elif [ -z "$programs" ]; then
    programs=build-gpu
    say "building (about two minutes on many cores)"
    build $programs -DTRIFOLD_NATIVE=1
fi
trifold=${trifold:-$programs/trifold}
for program in "$programs/$tests" "$trifold"; do [ -x "$program" ] || { echo "gpu_check: $program is missing" >&2; exit 2; }; done
rc=0
"$programs/$tests" --list-tests >"$log" 2>&1 || rc=$?
[ $rc -ne 77 ] || { tail -n 1 "$log" >&2; echo "gpu_check: nothing to check without a GPU; --rehearse BUILD plays the script through in an emulated build" >&2; exit 2; }
commit=$(cat "$programs/commit" 2>/dev/null || git rev-parse --short HEAD 2>/dev/null || echo unknown)
gpu=$(nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
gpu=${gpu:-no GPU found}
[ -z "$rehearse" ] || gpu="emulated GPU (nothing ran on hardware)"

wrong=0
report=$work/report
: >"$report"
note() { echo "$*" | tee -a "$report"; }
# verdict NAME SECONDS COMMAND...: runs a step within its time; its last line is shown, all of it when it fails.
verdict() {
    local name=$1 limit=$2 start=$SECONDS rc=0
    shift 2
    if [ "$(left)" -lt 15 ]; then note "| $name | skipped | the time was used up |"; return 0; fi
    local cut
    cut=$(left)
    timeout -k 5 "$((limit < cut ? limit : cut))" "$@" >"$log" 2>&1 || rc=$?
    # What hangs within its own limit is wrong; a skip is only what the budget of the whole script, or the slow sanitizer, cut short.
    if [ $rc -eq 124 ] || [ $rc -eq 137 ]; then [[ $limit -lt $cut && $name != compute-sanitizer* ]] || rc="cut short"; fi
    case $rc in
        0) note "| $name | ok | $(grep -v '^ *$' "$log" | tail -n 1 | cut -c1-100), $((SECONDS - start)) s |" ;;
        77) note "| $name | skipped | $(tail -n 1 "$log" | cut -c1-100) |" ;;
        "cut short") note "| $name | skipped | not finished in $((SECONDS - start)) s |"; rc=124 ;;
        *) note "| $name | WRONG | exit code $rc |"; tail -n 40 "$log"; wrong=$((wrong + 1)) ;;
    esac
    printf '%s\t%s\t%s\n' "$name" "$rc" "$((SECONDS - start))" >>"$work/verdicts"
}

say "gpu_check on $gpu, commit $commit"
note "| check | result | |"
note "| --- | --- | --- |"

# ---------------------------------------------------------------- 1 parity
verdict "operations at odd shapes" 150 "$programs/$tests" "~[trainer]~[real]"
[ -n "$rehearse" ] || verdict "operations at real shapes" 90 "$programs/$tests" "[real]"
verdict "tiny model, 20 steps against the CPU" 400 "$programs/$tests" "[trainer]"

# ---------------------------------------------------------------- 2 sanitizer
for tool in memcheck racecheck; do
    if ! command -v compute-sanitizer >/dev/null; then
        note "| compute-sanitizer $tool | skipped | not installed |"
    else
        verdict "compute-sanitizer $tool" 60 compute-sanitizer --tool "$tool" --error-exitcode 9 "$programs/$tests" "~[trainer]~[real]~[cudnn]"
    fi
done

# ---------------------------------------------------------------- training runs
random_tokens >"$work/tokens.bin"
train() {  # train RUN STEPS OPTIONS...   in a subshell: it is replaced by the program
    rm -rf "${work:?}/$1"
    exec "$trifold" train --run.device=$device --data.train="$work/tokens.bin" --run.dir="$work/$1" --run.tensorboard=off --train.steps="$2" --checkpoint.every=0 \
        --optim.warmup_steps=1 "${@:3}"
}

# ---------------------------------------------------------------- 3 repeatability
small=(--model.preset=gpt2-124m --model.layers=2 --train.dtype=bf16 --train.seq=256 --train.micro_batch=4)
[ -z "$rehearse" ] || small=(--model.layers=1 --model.hidden=64 --model.head_dim=64 --model.heads=1 --model.vocab=50257 --model.max_seq=32 --train.dtype=bf16 --train.seq=32 --train.micro_batch=1)
cat >"$work/repeat.sh" <<'END'
for run in once again; do
    (train "repeat-$run" 3 "$@" --debug.dump_params="$work/$run.params") >"$work/repeat.log" 2>&1 || {
        tail -n 5 "$work/repeat.log"
        grep -q 'run.attention = cudnn, but' "$work/repeat.log" && exit 77
        exit 1
    }
done
cmp "$work/once.params" "$work/again.params" && echo "weights after 3 steps are equal, $(stat -c %s "$work/once.params") bytes"
END
export -f train
export work trifold device
verdict "the same seed gives the same bits" 200 bash "$work/repeat.sh" "${small[@]}" --run.attention=own
verdict "the same with cuDNN's attention" 200 bash "$work/repeat.sh" "${small[@]}" --run.attention=cudnn

# ---------------------------------------------------------------- 4 ranks
# No launcher is needed: Hydra's variables say who is who. NCCL refuses ranks that share a GPU, so they send through the host.
cat >"$work/ranks.sh" <<'END'
model=(--model.vocab=257 "$@")
visible=${CUDA_VISIBLE_DEVICES:-0}
export CUDA_VISIBLE_DEVICES=${visible%%,*}  # all of them on one
"$trifold" data tokenize README.md --out "$work/bytes" --format llmc >"$work/tokenize.log" 2>&1 || { tail -n 1 "$work/tokenize.log"; exit 1; }
run_ranks() {  # run_ranks RUN RANKS OPTIONS...
    local r pids=() port=$((20000 + RANDOM % 10000))
    rm -rf "${work:?}/$1"
    for ((r = 0; r < $2; r++)); do
        if [ "$2" -gt 1 ]; then export PMI_RANK=$r PMI_SIZE=$2 MPI_LOCALRANKID=$r MPI_LOCALNRANKS=$2; fi
        "$trifold" train --run.device=$device --run.comm=host --launch.store=127.0.0.1:$port --data.train="$work/bytes.bin" --run.dir="$work/$1" --run.tensorboard=off \
            --train.dtype=fp32 --train.global_batch=4 --train.steps=4 --checkpoint.every=0 --optim.warmup_steps=1 "${model[@]}" "${@:3}" >"$work/$1.$r" 2>&1 &
        pids+=($!)
    done
    for r in "${pids[@]}"; do wait "$r" || { tail -qn 2 "$work/$1".[0-9]*; exit 1; }; done
}
values() { grep -oE '"(loss|grad_norm)": *[0-9.e+-]+' "$work/$1/metrics.jsonl" | sed 's/.*: *//'; }
run_ranks one 1
layouts=("2 --mesh.dp=2 --optim.zero=1" "2 --mesh.tp=2" "2 --mesh.pp=2" "8 --mesh.tp=2 --mesh.pp=2 --mesh.dp=2 --mesh.schedule=zero_bubble")
for layout in "${layouts[@]}"; do
    run_ranks many $layout
    paste <(values one) <(values many) | awk '{ d = ($1 - $2) / $1; if (d < 0) d = -d; if (d > worst) worst = d; ++n } END { exit !(n == 8 && worst < 1e-4) }' ||
        { echo "$layout: not the same as one rank"; paste <(values one) <(values many); exit 1; }
done
echo "${#layouts[@]} layouts of up to 8 ranks on one GPU agree with one rank"
END
shape=(--model.preset=gpt2-124m --model.layers=4 --train.seq=256)
[ -z "$rehearse" ] || shape=(--model.layers=2 --model.hidden=128 --model.heads=2 --model.max_seq=16)
verdict "layouts of several ranks on this GPU" 120 bash "$work/ranks.sh" "${shape[@]}"

# ---------------------------------------------------------------- 5 operations
if [ -n "$rehearse" ]; then
    note "| single operations | skipped | speeds need a GPU |"
else
    verdict "single operations" 150 "$programs/bench_gpu" --json "$work/operations.json"
    cp "$log" "$work/operations"
fi

# ---------------------------------------------------------------- 6 training
speed() {  # speed NAME STEPS OPTIONS...
    local name=$1 steps=$2
    if [ "$(left)" -lt 30 ]; then echo "| $name | skipped: the time was used up | | | |" >>"$work/speeds"; return; fi
    # Killed when enough was seen, so that no checkpoint of many gigabytes is written.
    rm -rf "$work/speed"
    (train speed 1000000 "${@:3}") >"$log" 2>&1 &
    pid=$!
    until [ "$(grep -c '"loss"' "$work/speed/metrics.jsonl" 2>/dev/null)" -ge "$steps" ] 2>/dev/null || [ "$(left)" -lt 5 ]; do
        kill -0 "$pid" 2>/dev/null || { echo "| $name | failed: $(tail -n 1 "$log" | cut -c1-150) | | | |" >>"$work/speeds"; wrong=$((wrong + 1)); pid=; return; }
        sleep 0.1
    done
    kill -9 "$pid" 2>/dev/null
    wait "$pid" 2>/dev/null
    pid=
    grep '"loss"' "$work/speed/metrics.jsonl" | tail -n +4 | head -n "$steps" >"$work/steps"
    [ -s "$work/steps" ] || { echo "| $name | skipped: the time was used up | | | |" >>"$work/speeds"; return; }
    [ "$(grep -c '"loss": *[0-9]' "$work/steps")" -eq "$(wc -l <"$work/steps")" ] || { echo "| $name | WRONG: a loss is not finite | | | |" >>"$work/speeds"; wrong=$((wrong + 1)); return; }
    local tokens mfu memory
    tokens=$(field tokens_per_s "$work/steps" | median) mfu=$(field mfu "$work/steps" | median) memory=$(field mem_bytes "$work/steps" | median)
    printf '| %s | %.0f | %.1f %% | %.1f GiB | %s |\n' "$name" "$tokens" "$(awk -v m="$mfu" 'BEGIN { print 100 * m }')" "$(awk -v b="$memory" 'BEGIN { print b / 2^30 }')" \
        "$(field loss "$work/steps" | tail -n 1)" >>"$work/speeds"
    grep -m 1 '^attention' "$log" | sed "s/^attention */- $name: attention by /" >>"$work/choices"
    printf '{"name": "%s", "tokens_per_s": %s, "mfu": %s, "mem_bytes": %s}\n' "$name" "$tokens" "$mfu" "$memory" >>"$work/speeds.jsonl"
}
peer() {  # peer NAME OPTIONS...
    [ -n "$torch" ] && [ "$(left)" -gt 60 ] || return 0
    if timeout "$(left)" python3 scripts/peers/pytorch_train.py --device cuda --dtype bf16 --compile --warmup 4 --steps 10 "${@:2}" >"$work/peer" 2>"$log"; then
        printf '| %s: PyTorch, compiled | %.0f | | %.1f GiB | |\n' "$1" "$(field tokens_per_s "$work/peer")" "$(field peak_gpu_bytes "$work/peer" | awk '{ print $1 / 2^30 }')" >>"$work/speeds"
    else
        echo "| $1: PyTorch | failed: $(tail -n 1 "$log" | cut -c1-100) | | | |" >>"$work/speeds"
    fi
}
torch=$(python3 -c 'import torch; assert torch.cuda.is_available(); print(torch.__version__)' 2>/dev/null || true)
if [ -z "$rehearse" ]; then
    speed "GPT-2 124M, 64 x 1024" 20 --model.preset=gpt2-124m --train.dtype=bf16 --run.deterministic=off --train.seq=1024 --train.micro_batch=64
    peer "GPT-2 124M, 64 x 1024" --batch 64 --seq 1024
    speed "GPT-3 1.3B, 8 x 2048" 12 --model.preset=gpt3-1.3b --train.dtype=bf16 --run.deterministic=off --train.seq=2048 --train.micro_batch=8
    peer "GPT-3 1.3B, 8 x 2048" --batch 8 --seq 2048 --layers 24 --hidden 2048 --heads 16 --max-seq 2048
    speed "Llama-3 8B, 8 of 32 layers, 2 x 4096" 12 --model.preset=llama3-8b --model.layers=8 --train.dtype=bf16 --run.deterministic=off --train.seq=4096 --train.micro_batch=2
    peer "Llama-3 8B, 8 of 32 layers, 2 x 4096" --family llama --batch 2 --seq 4096 --layers 8 --hidden 4096 --heads 32 --kv-heads 8 --ffn 14336 --vocab 128256 --max-seq 4096
fi

# ---------------------------------------------------------------- report
mkdir -p "$out"
name=$out/$(date +%F)-gpu
[ -z "$rehearse" ] || name=$work/rehearsal
{
    echo "# GPU check, $(date +%F)"
    printf '\n%s; commit %s; %s\n\n' "$gpu" "$commit" "${torch:+PyTorch $torch beside it}"
    cat "$report"
    if [ -s "$work/speeds" ]; then
        printf '\nTraining in bf16, one GPU, medians of the steps after the third:\n\n| model, sequences x tokens | tokens/s | MFU | memory | last loss |\n| --- | --- | --- | --- | --- |\n'
        cat "$work/speeds"
        [ ! -s "$work/choices" ] || { echo; cat "$work/choices"; }
    fi
    [ ! -s "$work/operations" ] || { printf '\n```\n'; cat "$work/operations"; printf '```\n'; }
} >"$name.md"
{
    printf '{"gpu": "%s", "commit": "%s", "wrong": %d, "checks": [' "$gpu" "$commit" "$wrong"
    awk -F"\t" '{ printf "%s{\"name\": \"%s\", \"exit_code\": %d, \"seconds\": %d}", (NR > 1 ? ", " : ""), $1, $2, $3 }' "$work/verdicts"
    printf '], "training": [%s]' "$(paste -sd, "$work/speeds.jsonl" 2>/dev/null)"
    [ ! -s "$work/operations.json" ] || printf ', "operations": %s' "$(cat "$work/operations.json")"
    echo '}'
} >"$name.json"
[ ! -s "$work/speeds" ] || { echo; cat "$work/speeds"; }
say "$((SECONDS - started)) s, $wrong wrong; results in $name.md and $name.json"
[ "$wrong" -eq 0 ]

#!/usr/bin/env bash
# test/drills/run_launch_refusals.sh TRIFOLD   What can go wrong with a job of several ranks, at its launch and later: one sentence for the whole job
# (beside what mpirun says), the documented exit code, and nobody left behind. Also the launches that need no mpirun.
set -euo pipefail
. "$(dirname "$0")/ranks.sh"
tokens text 21
mkdir "$work/here" "$work/elsewhere"
cp "$work/text.bin" "$work/here/tokens.bin"
tr 1 2 <"$work/text.bin" >"$work/elsewhere/tokens.bin"
head -c 1024 "$work/text.bin" | dd of="$work/elsewhere/tokens.bin" conv=notrunc status=none  # the header
{ cat "$trifold"; echo; } >"$work/other_build"
chmod +x "$work/other_build"
failures=0 cases=0 runs=0 slowest_ms=0

# Every rank starts through this: notes its process, and one of them does something else.
cat >"$work/rank" <<'WRAPPER'
#!/usr/bin/env bash
# rank DIR ODD_ONE CHANGE PROGRAM ARGS...
dir=$1 odd=$2 change=$3 program=$4
shift 4
rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-$SLURM_PROCID}}
echo $$ >"$dir/pid.$rank"
if [ "$rank" = "$odd" ]; then
    case $change in
    --*) set -- "$@" "$change" ;;
    cd=*) cd "${change#cd=}" ;;
    program=*) program=${change#program=} ;;
    limit=*) ulimit -f "${change#limit=}" ;;
    esac
fi
exec "$program" "$@"
WRAPPER
chmod +x "$work/rank"
cd "$work/here"

options=(train --run.device=cpu --model.layers=4 --model.hidden=32 --model.heads=4 --model.vocab=257 --model.max_seq=16 --train.dtype=fp32 --train.steps=4
    --data.train=tokens.bin --run.threads=1 --run.tensorboard=off)
fresh() {  # fresh [ODD CHANGE]: sets dir and command, of a job that is about to start
    runs=$((runs + 1))
    dir=$work/job-$runs
    mkdir "$dir"
    command=("$work/rank" "$dir" "${1:-none}" "${2:-none}" "$trifold" "${options[@]}" --run.dir="$dir/run")
}
failed() {
    failures=$((failures + 1))
    echo "FAILED: $1"
    grep -a . "$dir"/err* | head -n 12 | sed 's/^/    /'
}
now_ms() { echo $(($(date +%s%N) / 1000000)); }
gone() { ! kill -0 "$1" 2>/dev/null || grep -q '^State:.*Z' "/proc/$1/status" 2>/dev/null; }
all_gone() { local f; for f in "$dir"/pid.*; do gone "$(cat "$f")" || return 1; done; }
wait_for() {  # wait_for SECONDS COMMAND...
    local end=$(($(now_ms) + 1000 * $1))
    shift
    until "$@"; do [ "$(now_ms)" -lt $end ] || return 1; sleep 0.02; done
}
# verdict NAME CODES WORDS: of the job in $dir that ended with $code. WORDS are extended regular expressions between ;
verdict() {
    local word sentences
    cases=$((cases + 1))
    wait_for 5 all_gone || { failed "$1: ranks are left: $(grep -l . "$dir"/pid.* | xargs cat | tr '\n' ' ')"; return; }
    case " $2 " in *" $code "*) ;; *) failed "$1: exit code $code, expected $2"; return ;; esac
    sentences=$(cat "$dir"/err* | grep -ac 'trifold: ' || true)
    [ "$sentences" -eq "$([ -n "$3" ] && echo 1 || echo 0)" ] || { failed "$1: $sentences sentences"; return; }
    ! cat "$dir"/err* | grep -aqE 'terminate called|internal error|Segmentation|abort\(' || { failed "$1: a crash"; return; }
    local IFS=';'
    for word in $3; do cat "$dir"/err* | grep -aqE "trifold: .*$word" || { failed "$1: the sentence does not mention $word"; return; }; done
}
refused() {  # refused NAME CODE WORDS RANKS OPTIONS...   the job of `fresh`
    code=0
    timeout 60 mpirun --oversubscribe --bind-to none -n "$4" "${command[@]}" "${@:5}" >"$dir/out" 2>"$dir/err" </dev/null || code=$?
    verdict "$1" "$2" "$3"
}
# by_variables LAUNCHER RANKS OPTIONS...: as another launcher would start them; code is the highest one
by_variables() {
    local r pids=() c
    for ((r = 0; r < $2; r++)); do
        case $1 in
        slurm) env=(SLURM_JOB_ID=$runs SLURM_STEP_ID=0 SLURM_PROCID=$r SLURM_NTASKS="$2" SLURM_LOCALID=$r) ;;
        hydra) env=(PMI_RANK=$r PMI_SIZE="$2" MPI_LOCALRANKID=$r MPI_LOCALNRANKS="$2") ;;
        esac
        env "${env[@]}" timeout 60 "${command[@]}" "${@:3}" >"$dir/out.$r" 2>"$dir/err.$r" </dev/null &
        pids+=($!)
    done
    code=0
    for r in "${pids[@]}"; do c=0; wait "$r" || c=$?; [ $c -le $code ] || code=$c; done
}
port=$((21000 + $$ % 9000))
# The same without MPI, which is quicker.
refused_quickly() { code=0; by_variables slurm "$4" --launch.store=127.0.0.1:$port "${@:5}"; verdict "$1" "$2" "$3"; }
refused_all() { fresh; refused_quickly "$@"; }

# ---------------------------------------------------------------- the mesh
fresh; refused "ranks that do not fit the mesh" 2 'mesh.tp \* pp \* cp = 3;4 ranks' 4 --mesh.tp=3
refused_all "heads"           2 'model.heads = 6 is not divisible by mesh.tp = 4' 4 --mesh.tp=4 --model.heads=6 --model.head_dim=8
refused_all "kv_heads"        2 'model.kv_heads = 1 is not divisible by mesh.tp = 2' 2 --mesh.tp=2 --model.kv_heads=1
refused_all "ffn"             2 'model.ffn_hidden = 63 is not divisible by mesh.tp = 2' 2 --mesh.tp=2 --model.ffn_hidden=63
refused_all "tokens"          2 'micro_batch \* train.seq = 15 is not divisible by mesh.tp = 2' 2 --mesh.tp=2 --train.seq=15
refused_all "stages"          2 'model.layers = 1;mesh.pp' 2 --mesh.pp=2 --model.layers=1
refused_all "layers a stage"  2 'mesh.layers_per_stage adds up to 5' 2 --mesh.pp=2 --mesh.layers_per_stage=2,3
refused_all "zero 2 and stages" 2 'optim.zero = 2;mesh.pp = 2' 2 --mesh.pp=2 --optim.zero=2
refused_all "more ranks than work" 2 'train.global_batch = 1;mesh.dp' 2 --train.global_batch=1

# ---------------------------------------------------------------- ranks that differ
fresh 2 --optim.lr=0.5;          refused "another learning rate" 2 'rank 2;optim.lr: 0.0006 and 0.5' 3
fresh 1 --run.dir="$work/other"; refused_quickly "another run directory" 2 'rank 1;run.dir' 2
fresh 1 --optim.lrr=1;           refused "a typo on one rank" 2 'unknown option --optim.lrr' 2
fresh 0 --optim.lrr=1;           refused "a typo on rank 0" 2 'unknown option --optim.lrr' 2
fresh; refused "a typo everywhere" 2 'unknown option --optim.lrr' 2 --optim.lrr=1
fresh 2 program="$work/other_build"; refused_quickly "another build" 2 'rank 2 has the build' 3
fresh 1 cd="$work";              refused "no data on one host" 3 'rank 1 on .*tokens.bin' 2
fresh 2 cd="$work/elsewhere";    refused_quickly "other data on one host" 3 'rank 2 has data.train' 3
fresh 1 limit=16;                refused_quickly "no room for checkpoints on one host" 4 'checkpoint of step 4 was not saved;rank 1: ' 2
[ -z "$(ls "$dir/run/checkpoints")" ] || failed "... leaves a checkpoint: $(ls "$dir/run/checkpoints")"
fresh; refused "an unknown interface" 2 "launch.interface is 'ib77'" 2 --launch.interface=ib77

# ---------------------------------------------------------------- launchers without MPI
fresh; by_variables slurm 3;                                                  verdict "Slurm without a store" 2 'give --launch.store=HOST:PORT'
fresh; by_variables hydra 3;                                                  verdict "Hydra without a store" 2 'give --launch.store=HOST:PORT'
fresh; by_variables slurm 3 --launch.store=no-such-host.invalid:$port;        verdict "a host that does not resolve" 2 'no-such-host.invalid;does not resolve'
fresh; by_variables slurm 3 --launch.store=127.0.0.1;                         verdict "a store without a port" 2 'must be HOST:PORT'
fresh 2 --optim.lrr=1; refused_quickly "a typo on one rank of Slurm's" 2 'unknown option --optim.lrr' 3
fresh; by_variables slurm 3 --launch.store=127.0.0.1:$port --launch.interface=ib77; verdict "an unknown interface under Slurm" 2 'ib77'
fresh
SLURM_JOB_ID=x SLURM_STEP_ID=0 SLURM_PROCID=0 SLURM_NTASKS=2 "${command[@]}" --launch.store=127.0.0.1:$((port + 1)) >"$dir/out" 2>"$dir/err" </dev/null &
keeper=$!
started+=($keeper)
listens() { grep -qi ":$(printf %04X "$1") 00000000:0000 0A" /proc/net/tcp; }
wait_for 20 listens $((port + 1)) || die "rank 0 of a job does not listen"
fresh; by_variables slurm 2 --launch.store=127.0.0.1:$((port + 1)) --resilience.start_s=2; verdict "a port that is taken" 2 "port $((port + 1)) of this host is taken"
kill -9 $keeper; { wait $keeper || true; } 2>/dev/null

trains=(--train.global_batch=8 --mesh.tp=2 --optim.lr=3e-3)
fresh; mpi=$dir; refused "mpirun" 0 '' 4 "${trains[@]}" --debug.dump_params="$dir/params"
for launcher in slurm hydra; do
    fresh; by_variables $launcher 4 "${trains[@]}" --launch.store=localhost:$((port + 2)) --debug.dump_params="$dir/params"; verdict "$launcher" 0 ''
    cmp "$mpi/params" "$dir/params" || failed "$launcher trains other weights than mpirun"
    asks "$launcher" metrics "$mpi/run/metrics.jsonl" "$dir/run/metrics.jsonl" 0 loss grad_norm lr
done

# ---------------------------------------------------------------- later
start() {  # start RANKS OPTIONS...: in the background, until some steps are done
    fresh
    mpirun --oversubscribe --bind-to none -n "$1" "${command[@]}" --train.steps=1000000 --train.global_batch=8 --run.log_every=100000 "${@:2}" >"$dir/out" 2>"$dir/err" </dev/null &
    launcher=$!
    started+=($launcher)
    wait_for 40 steps_done 3 || die "a job does not start: $(cat "$dir/err")"
}
steps_done() { [ -f "$dir/run/metrics.jsonl" ] && [ "$(grep -c '"loss"' "$dir/run/metrics.jsonl")" -ge "$1" ]; }
pid_of() { cat "$dir/pid.$1"; }
finish() {  # finish SECONDS: until all ranks are gone; sets code to mpirun's
    local begin took
    begin=$(now_ms)
    wait_for "$1" all_gone 2>/dev/null || { failed "ranks are not gone after $1 s"; kill -9 $launcher; }
    took=$(($(now_ms) - begin))
    [ $took -le $slowest_ms ] || slowest_ms=$took
    code=0
    { wait $launcher || code=$?; } 2>/dev/null
}
saved_as_logged() {  # the checkpoint of the last step in the log is there
    local last
    last=$(sed -n 's/.*"step":\([0-9]*\),"loss".*/\1/p' "$dir/run/metrics.jsonl" | tail -n 1)
    [ -f "$dir/run/checkpoints/$(printf 'step-%08d' "$last")/manifest.json" ] || failed "$1: step $last is not saved: $(ls "$dir/run/checkpoints")"
}

# mpirun ends with 128 + 9 when it sees the killed rank first, and with our 75 when it sees one of the others first.
start 4 --mesh.tp=2;       kill -9 "$(pid_of 3)"; finish 10; verdict "rank 3 killed" "75 137" 'rank 3 on .* ended without a word'
start 4 --mesh.pp=2;       kill -9 "$(pid_of 0)"; finish 10; verdict "rank 0 killed" "75 137" 'rank 0.* ended without a word'
start 2 --resilience.stall_s=2; kill -STOP "$(pid_of 1)"; finish 20; verdict "rank 1 stopped" "75 137" "group 'dp';waits for rank 1 on"
start 4;                   kill -9 $launcher;     finish 10; cases=$((cases + 1))
for signal in TERM INT; do
    expected=$([ $signal = TERM ] && echo 143 || echo 130)
    start 4 --mesh.tp=2;   kill -$signal "$(pid_of 2)"; finish 20; verdict "SIG$signal to rank 2" $expected ''; saved_as_logged "SIG$signal to rank 2"
    # mpirun passes SIGTERM on, whatever it got, and SIGKILL a second later; it ends with 1.
    start 2;               kill -$signal $launcher;     finish 20; verdict "SIG$signal to mpirun" 1 '';         saved_as_logged "SIG$signal to mpirun"
done

[ $failures -eq 0 ] || { echo "$failures of $cases cases FAILED"; exit 1; }
echo "$cases launches and ends of jobs of several ranks: one sentence each, nobody left; the slowest end took $slowest_ms ms"

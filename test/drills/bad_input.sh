#!/usr/bin/env bash
# test/drills/bad_input.sh TRIFOLD   What a user can do wrong, or a disk: one sentence, its exit code, nothing lost.
#
#   refused NAME CODE WORDS ARGS...   trifold ARGS must exit CODE and print nothing but one line on standard error, which
#                                     starts with "trifold: " and has all WORDS (extended regular expressions between ;)
#   goes_on NAME CODE WORDS ARGS...   the same for runs that report a problem and go on: more lines, also on standard output
# Prints the cases that fail, and at the end how many there were.
set -uo pipefail

# Read-only and small file systems are mounted in a namespace of our own, which vanishes with this process.
if [ -z "${BAD_INPUT_MOUNTS:-}" ]; then
    for flags in -m -rm; do
        unshare $flags true 2>/dev/null && BAD_INPUT_MOUNTS=yes exec unshare $flags "$0" "$@"
    done
    BAD_INPUT_MOUNTS=no
fi

trifold=$(realpath "${1:-build/trifold}")
root=$(realpath "$(dirname "$0")/../..")
golden=$root/test/golden
work=$(mktemp -d)
mounts=()
clean_up() {
    for m in "${mounts[@]}"; do umount -l "$m" 2>/dev/null; done
    rm -rf "$work"
}
trap clean_up EXIT
cases=0 failures=0 runs=0

fail() {
    failures=$((failures + 1))
    echo "FAILED: $1"
    [ ! -s "$work/err" ] || sed 's/^/    stderr: /' "$work/err" | head -n 5
    [ ! -s "$work/out" ] || sed 's/^/    stdout: /' "$work/out" | tail -n 3
}
has_words() {  # has_words FILE WORDS
    local IFS=';' word text
    text=$(cat "$1")
    set -f
    for word in $2; do grep -qiE -- "$word" <<<"$text" || { missing=$word; set +f; return 1; }; done
    set +f
}
run() { timeout 60 "$trifold" "$@" >"$work/out" 2>"$work/err" </dev/null; }
refused() {
    local name=$1 code=$2 words=$3 got=0
    shift 3
    cases=$((cases + 1))
    run "$@" || got=$?
    if [ "$got" -ne "$code" ]; then fail "$name: exit code $got, expected $code"
    elif [ "$(wc -l <"$work/err")" -ne 1 ]; then fail "$name: not one line on standard error"
    elif ! grep -q '^trifold: ' "$work/err"; then fail "$name: the message does not start with \"trifold: \""
    elif ! has_words "$work/err" "$words"; then fail "$name: the message does not mention $missing"
    elif [ -s "$work/out" ]; then fail "$name: something on standard output"
    fi
}
goes_on() {
    local name=$1 code=$2 words=$3 got=0
    shift 3
    cases=$((cases + 1))
    run "$@" || got=$?
    if [ "$got" -ne "$code" ]; then fail "$name: exit code $got, expected $code"
    elif ! has_words <(cat "$work/err" "$work/out") "$words"; then fail "$name: no message mentions $missing"
    fi
}
expect() {  # expect NAME COMMAND...: any other condition
    local name=$1
    shift
    cases=$((cases + 1))
    "$@" || fail "$name"
}
saved_as_logged() {  # the newest checkpoint in $dir is of the last step in its log, if there is one
    local last
    last=$(sed -n 's/.*"step":\([0-9]*\),"loss".*/\1/p' "$dir/metrics.jsonl" | tail -n 1)
    [ -z "$last" ] || [ -f "$dir/checkpoints/$(printf 'step-%08d' "$last")/manifest.json" ]
}
fresh() { runs=$((runs + 1)); dir=$work/run-$runs; }  # sets dir, a run directory that does not exist yet

le() {  # le BYTES NUMBER: little endian
    local i n=$2
    for ((i = 0; i < $1; i++)); do printf "\\x$(printf %02x $((n & 255)))"; n=$((n >> 8)); done
}
token_file() {  # token_file MAGIC VERSION ANNOUNCED PAYLOAD_FILE
    le 4 "$1"; le 4 "$2"; le 4 "$3"; head -c 1012 /dev/zero; cat "$4"
}
letters() { head -c "$1" /dev/zero | tr '\0' 'a' | sed 's/./&\x00/g'; }  # so many tokens of 16 bits, all 97
safetensors() { le 8 ${#1}; printf %s "$1"; head -c "$2" /dev/zero; }   # safetensors HEADER DATA_BYTES

model=(--model.layers=1 --model.hidden=32 --model.heads=2 --model.vocab=257 --model.max_seq=16)
plain=(--train.seq=16 --train.dtype=fp32 --train.steps=2 --run.tensorboard=off --run.threads=1)
letters 400 >"$work/payload"
token_file 20240520 1 400 "$work/payload" >"$work/good.bin"
good=(--data.train="$work/good.bin")
tiny() { fresh; words=(train "${model[@]}" "${plain[@]}" --run.dir="$dir" "$@"); }  # sets words, a training command without data
refused_train() {  # refused_train NAME CODE WORDS OPTIONS...
    local name=$1 code=$2 expected=$3
    shift 3
    tiny "$@"
    refused "$name" "$code" "$expected" "${words[@]}"
}

# ---------------------------------------------------------------- options and configuration
tiny "${good[@]}"
goes_on "a good run" 0 "" "${words[@]}"
refused       "no such command"           2 'trian;--help'                trian
refused_train "misspelt option"           2 '--optim.weigth_decay;did you mean;--optim.weight_decay' "${good[@]}" --optim.weigth_decay=0
refused_train "unknown option"            2 'unknown option;--zzz'        "${good[@]}" --zzz=1
refused       "mesh beyond any plan"      2 '33554432 ranks;at most'     plan --model.preset=megascale-175b --mesh.tp=128 --mesh.pp=8 --mesh.dp=32768
refused_train "stray argument"            2 'unexpected;stray'            "${good[@]}" stray
refused_train "wrong type"                2 'train.steps;integer;many'    "${good[@]}" --train.steps=many
refused_train "not a choice"              2 'train.dtype;fp32;bf16;fp8'   "${good[@]}" --train.dtype=fp8
refused_train "out of range"              2 'optim.beta1;1.5'             "${good[@]}" --optim.beta1=1.5
refused_train "no value"                  2 'optim.lr;value'              "${good[@]}" --optim.lr
echo '{"optim": {"learning_rate": 1}}'   >"$work/key.json"
echo '{"optimm": {"lr": 1}}'             >"$work/section.json"
echo '{"train": {"steps": "ten"}}'       >"$work/type.json"
printf '{"train":\n {"steps" 10}}\n'     >"$work/syntax.json"
refused_train "unknown JSON key"          2 'key.json;optim.learning_rate'      "${good[@]}" --config "$work/key.json"
refused_train "misspelt JSON section"     2 'section.json;optimm;did you mean'  "${good[@]}" --config "$work/section.json"
refused_train "JSON value of a wrong type" 2 'type.json;train.steps;integer;ten' "${good[@]}" --config "$work/type.json"
refused_train "JSON syntax"               2 'syntax.json;line 2;column'         "${good[@]}" --config "$work/syntax.json"
refused_train "no such config file"       2 'absent.json;no such file'          "${good[@]}" --config "$work/absent.json"
refused_train "misspelt preset"           2 'gpt2-142m;gpt2-124m'               "${good[@]}" --model.preset=gpt2-142m
refused_train "heads do not divide hidden" 2 'model.heads;3;32'                 "${good[@]}" --model.heads=3
refused_train "heads do not divide kv_heads" 2 'kv_heads;3;4'                   "${good[@]}" --model.heads=4 --model.kv_heads=3
refused_train "window -1"                 2 'model.window;-1'                   "${good[@]}" --model.window=-1
refused_train "odd head_dim with rotary positions" 2 'head_dim;7;even'          "${good[@]}" --model.position=rope --model.head_dim=7
refused_train "sequence longer than the model" 2 'train.seq;17;16'              "${good[@]}" --train.seq=17
refused_train "batch does not divide"     2 'global_batch;5;micro_batch;2'      "${good[@]}" --train.global_batch=5 --train.micro_batch=2
refused_train "mesh larger than one process" 2 'mesh.tp;2'                      "${good[@]}" --mesh.tp=2
refused_train "evaluation without data"   2 'eval_every;data.val'               "${good[@]}" --data.eval_every=1
refused_train "cuDNN's attention on a CPU" 2 'run.attention = cudnn;GPU'        "${good[@]}" --run.device=cpu --run.attention=cudnn
refused       "does not fit into memory"  2 'needs;available;GiB'                train --model.preset=megascale-530b "${plain[@]}" "${good[@]}" --run.dir="$work/none"
refused       "no model"                  2 'model;preset'                      train "${plain[@]}" "${good[@]}" --run.dir="$work/none"
refused_train "no data"                   2 'data.train'

# ---------------------------------------------------------------- token files
bad_tokens() {  # bad_tokens NAME WORDS FILE OPTIONS...
    local name=$1 expected=$2 file=$3
    shift 3
    refused_train "$name" 3 "$(basename "$file" | tr '*' .);$expected" --data.train="$file" "$@"
}
: >"$work/empty.bin"
head -c 100 "$work/good.bin"                                    >"$work/header.bin"
head -c 1500 "$work/good.bin"                                   >"$work/truncated.bin"
{ cat "$work/good.bin"; printf x; }                             >"$work/odd.bin"
token_file 20240521 1 400 "$work/payload"                       >"$work/magic.bin"
token_file 20240520 9 400 "$work/payload"                       >"$work/version.bin"
{ head -c 400 "$work/payload"; le 2 257; tail -c 398 "$work/payload"; } >"$work/payload257"
token_file 20240520 1 400 "$work/payload257"                    >"$work/vocab.bin"
head -c 32 "$work/payload" >"$work/payload16"; token_file 20240520 1 16 "$work/payload16" >"$work/short.bin"
mkdir "$work/folder"
bad_tokens "missing token file"           'no such file|no token file'      "$work/absent.bin"
bad_tokens "glob without a match"         'match'                           "$work/absent-*.bin"
bad_tokens "folder instead of a file"     'folder|directory|plain file|bin' "$work/folder"
bad_tokens "empty token file"             'empty|0 bytes'                   "$work/empty.bin"
bad_tokens "half a header"                '100'                             "$work/header.bin"
bad_tokens "truncated token file"         '400;238|1500|1824'               "$work/truncated.bin"
bad_tokens "odd byte count"               '1825|odd'                        "$work/odd.bin"
bad_tokens "wrong magic number"           '20240521|magic|token file'       "$work/magic.bin"
bad_tokens "wrong version"                'version;9'                       "$work/version.bin"
bad_tokens "shorter than one sequence"    '16;17'                           "$work/short.bin"
tiny --data.train="$work/vocab.bin" --train.steps=100  # found when it is read, at the latest in the first epoch
goes_on "token outside the vocabulary"    3 'vocab.bin;257;200;model.vocab' "${words[@]}"
expect  "... and what was learnt before is saved" saved_as_logged
refused_train "one bad file among good ones" 3 'magic.bin' --data.train="[{\"path\":\"$work/good.bin\",\"weight\":1},{\"path\":\"$work/magic.bin\",\"weight\":1}]"
refused_train "weight 0"                  2 'weight'                        --data.train="[{\"path\":\"$work/good.bin\",\"weight\":0}]"
head -c 64 /dev/zero >"$work/mega.bin"; head -c 64 /dev/zero >"$work/mega.idx"
cp "$work/mega.bin" "$work/lonely.bin"
refused "Megatron index of another format" 3 'mega.idx'   data inspect "$work/mega"
refused "Megatron data without index"      3 'lonely'     data inspect "$work/lonely"

# ---------------------------------------------------------------- tokenizers and text
echo '{"model": {"type": "WordPiece", "vocab": {}}}'             >"$work/wordpiece.json"
sed 's/"ByteLevel"/"Metaspace"/' "$golden/tokenizers/gpt2.json"  >"$work/metaspace.json"
echo '{"model": '                                                >"$work/half.json"
printf 'plain text\nbad \xff byte'                               >"$work/latin.txt"
printf '{"text": "good"}\n{"text": "bad \xff"}\n'                >"$work/latin.jsonl"
printf '{"text": "good"}\n{"text": \n'                           >"$work/broken.jsonl"
printf '{"text": "good"}\n{"body": "other"}\n'                   >"$work/keys.jsonl"
bpe=(--tokenizer "$golden/tokenizers/gpt2.json")
tokenize() { refused "$1" "$2" "$3" data tokenize "${@:4}" --out "$work/tokens-out" --format llmc; }
tokenize "tokenizer of an unknown kind"    3 'wordpiece.json;WordPiece;BPE'  "$work/key.json" --tokenizer "$work/wordpiece.json"
tokenize "unknown pre-tokenizer"           3 'metaspace.json;Metaspace'      "$work/key.json" --tokenizer "$work/metaspace.json"
tokenize "tokenizer that is no JSON"       3 'half.json;JSON'                "$work/key.json" --tokenizer "$work/half.json"
tokenize "missing tokenizer"               3 'absent.json'                   "$work/key.json" --tokenizer "$work/absent.json"
tokenize "missing text"                    3 'absent.txt;no file|no such file' "$work/absent.txt"
tokenize "text that is not UTF-8, BPE"     3 'latin.txt;UTF-8;15'            "$work/latin.txt" "${bpe[@]}"
tokenize "JSONL that is not UTF-8"         3 'latin.jsonl;UTF-8;31'          "$work/latin.jsonl" "${bpe[@]}"
tokenize "JSONL that is no JSON"           3 'broken.jsonl;line 2|:2'        "$work/broken.jsonl"
mkdir "$work/tokens-out.bin.tmp" && touch "$work/tokens-out.bin.tmp/somebody's"
tokenize "folder in the way of a new file" 3 'create;tokens-out.bin.tmp'     "$work/key.json"
expect   "that folder is still there"      test -f "$work/tokens-out.bin.tmp/somebody's"
rm -r "$work/tokens-out.bin.tmp"
tokenize "JSONL without text"              3 'keys.jsonl;line 2|:2;text'     "$work/keys.jsonl"
expect   "a refused text leaves no token file" test -z "$(ls "$work" | grep tokens-out)"
goes_on  "bytes take any text" 0 "" data tokenize "$work/latin.txt" --out "$work/latin" --format llmc
refused  "tokens of another tokenizer's model" 2 'vocab|ids' sample --init.from "$golden/hf/gpt2" --data.tokenizer="$golden/tokenizers/gpt2.json" --prompt a --tokens 1

# ---------------------------------------------------------------- weights from elsewhere
broken_weights() {  # broken_weights NAME WORDS: $work/hf is a copy of a good folder, already broken
    fresh
    refused "$1" 4 "$2" train --init.from="$work/hf" --train.seq=16 --train.steps=1 --train.dtype=fp32 "${good[@]}" --run.dir="$dir" --run.tensorboard=off
    rm -rf "$work/hf"
}
copy() { cp -r "$golden/hf/$1" "$work/hf"; }
copy gpt2; safetensors '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}' 12 >"$work/hf/model.safetensors"
broken_weights "safetensors that overlap"        'model.safetensors;overlap|[^0-9]4[^0-9]'
copy gpt2; { le 8 $((1 << 40)); head -c 100 /dev/zero; } >"$work/hf/model.safetensors"
broken_weights "safetensors header too large"    'model.safetensors;header;1099511627776'
copy gpt2; head -c 4000 "$golden/hf/gpt2/model.safetensors" >"$work/hf/model.safetensors"
broken_weights "truncated safetensors"           'model.safetensors'
copy gpt2; safetensors '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}' 8 >"$work/hf/model.safetensors"
broken_weights "safetensors without the weights" 'wte|missing'
copy gpt2; sed -i 's/"n_embd": 48/"n_embd": 64/' "$work/hf/config.json"
broken_weights "weights of another shape"        '48;64'
copy gpt2; sed -i 's/"model_type": "gpt2"/"model_type": "bloom"/' "$work/hf/config.json"
broken_weights "unknown family"                  'model_type;bloom;gpt2'
copy llama-sharded; rm "$work/hf/model-00002-of-00002.safetensors"
broken_weights "missing shard"                   'model-00002-of-00002.safetensors'
copy llama; sed -i 's/"llama3"/"yarn"/' "$work/hf/config.json"
broken_weights "unknown rope scaling"            'yarn;llama3'
mkdir "$work/hf"
broken_weights "empty folder"                    'hf'

# ---------------------------------------------------------------- checkpoints
checkpoints_of() { ls "$1/checkpoints" | grep '^step-' | sort; }
newest() { echo "$1/checkpoints/$(checkpoints_of "$1" | tail -n 1)"; }
flip_byte() { printf '\xa5' | dd of="$1" bs=1 seek=$(($(stat -c %s "$1") / 2)) conv=notrunc status=none; }
saved() {  # a run of 4 steps with checkpoints of steps 2, 3 and 4 in $dir, and in words how to go on to step 6
    tiny "${good[@]}" --train.steps=4 --checkpoint.every=1
    goes_on "a run that saves" 0 "" "${words[@]}"
    words+=(--train.steps=6)
}
saved; flip_byte "$(ls "$(newest "$dir")"/*.safetensors | head -n 1)"
goes_on "damaged checkpoint: the older one is used" 0 'step-00000004;damaged' "${words[@]}"
expect  "... and the run is complete" grep -q '"step":6,' "$dir/metrics.jsonl"
saved; rm "$(newest "$dir")/manifest.json"
goes_on "half-written checkpoint: the older one is used" 0 'step-00000004' "${words[@]}"
saved; truncate -s -1 "$(ls "$(newest "$dir")"/*.safetensors | head -n 1)"
goes_on "truncated checkpoint: the older one is used" 0 'step-00000004' "${words[@]}"
saved; sed -i 's/"format_version"/"format_versiom"/' "$(newest "$dir")/manifest.json"; printf ' ' >>"$(newest "$dir")/manifest.json"
goes_on "damaged manifest: the older one is used" 0 'step-00000004;manifest' "${words[@]}"
saved; for c in $(checkpoints_of "$dir"); do flip_byte "$(ls "$dir/checkpoints/$c"/*.safetensors | head -n 1)"; done
refused "every checkpoint is damaged" 4 'no checkpoint;damaged;resume' "${words[@]}"
expect  "... and none was deleted" test "$(checkpoints_of "$dir" | wc -l)" -eq 3
saved
refused "checkpoint of another model" 4 'another model;hidden' "${words[@]}" --model.hidden=64
letters 300 >"$work/payload300"; token_file 20240520 1 300 "$work/payload300" >"$work/other.bin"
refused "checkpoint of another data set" 4 'data' "${words[@]}" --data.train="$work/other.bin"
refused "checkpoint that is not there" 4 'absent' "${words[@]}" --checkpoint.resume="$work/absent"
refused "export of a damaged checkpoint" 4 'damaged|byte' export "$(flip_byte "$(ls "$(newest "$dir")"/*.safetensors | head -n 1)"; newest "$dir")" --to "$work/exported" --format hf
expect  "... leaves nothing" test ! -e "$work/exported"

# ---------------------------------------------------------------- disks
small_disk() {  # small_disk BYTES: sets disk
    disk=$work/disk-${#mounts[@]}
    mkdir "$disk" && mount -t tmpfs -o "size=$1" tmpfs "$disk" && mounts+=("$disk")
}
wait_for() {  # wait_for SECONDS COMMAND...
    local end=$((SECONDS + $1))
    shift
    until "$@" 2>/dev/null; do [ $SECONDS -lt $end ] || return 1; sleep 0.02; done
}
steps_done() { [ "$(grep -c '"loss"' "$1/metrics.jsonl")" -ge "$2" ]; }
start() { "$trifold" "$@" >"$work/out" 2>"$work/err" </dev/null & pid=$!; }
finish() { { wait "$pid" && code=0 || code=$?; } 2>/dev/null; }
gone() { ! kill -0 "$pid" || grep -q '^State:.*Z' "/proc/$pid/status"; }

: >"$work/file"
tiny "${good[@]}"
refused "run directory that is a file" 2 "$work/file" "${words[@]}" --run.dir="$work/file"
if [ "$BAD_INPUT_MOUNTS" = yes ] && small_disk 1m; then
    mount -o remount,ro "$disk"
    tiny "${good[@]}"
    refused "read-only run directory" 2 'read-only' "${words[@]}" --run.dir="$disk/run"
    tiny "${good[@]}"
    refused "read-only checkpoint directory" 4 'read-only' "${words[@]}" --checkpoint.dir="$disk/checkpoints"
    tokenize_to() { refused "$1" 3 "$2" data tokenize "$work/key.json" --out "$3" --format llmc; }
    tokenize_to "read-only output" 'read-only' "$disk/tokens"
    small_disk 100k
    tiny "${good[@]}"
    refused "disk full before step 0" 4 'checkpoint takes;free' "${words[@]}" --checkpoint.dir="$disk/checkpoints"

    small_disk 4m
    tiny "${good[@]}" --train.steps=1000000 --checkpoint.every=20 --checkpoint.keep=1 --checkpoint.dir="$disk/checkpoints"
    start "${words[@]}"
    has_checkpoint() { ls "$disk"/checkpoints/step-*[0-9]/manifest.json >"$work/listing"; }
    expect "a run on a disk that is large enough saves" wait_for 20 has_checkpoint
    # A save in progress may still end and free the space of an older one, so the disk is filled again and again.
    for _ in 1 2 3 4 5 6 7 8; do head -c 4m /dev/zero >>"$disk/filler" 2>/dev/null; sleep 0.1; done
    expect "disk full during training: the run says so" wait_for 20 grep -qiE 'no space|save.*failed|could not' "$work/err"
    before=$(grep -c '"loss"' "$dir/metrics.jsonl")
    expect "... and goes on" wait_for 20 steps_done "$dir" $((before + 50))
    kill -TERM $pid; finish
    expect "... and exits 4 when the last save fails too ($code)" test "$code" -eq 4
    expect "... and keeps a complete checkpoint" test -n "$(ls "$disk"/checkpoints/step-*[0-9]/manifest.json)"
    rm -f "$disk/filler"
    step=$(basename "$(newest "$disk")" | sed 's/step-0*//')
    goes_on "... from which it resumes" 0 "" "${words[@]}" --train.steps=$((step + 3))
else
    echo "skipped: read-only and full disks (mounting is not possible here)"
fi

# ---------------------------------------------------------------- numbers that are not finite
tiny "${good[@]}" --train.steps=6
goes_on "NaN: the step is skipped" 0 'step 3' "${words[@]}" --inject 'kind=nan,step=3'
expect  "... counted" grep -q '"kind":"skip' "$dir/events.jsonl"
expect  "... and the run is complete" grep -q '"step":6,' "$dir/metrics.jsonl"
tiny "${good[@]}" --train.steps=100 --optim.lr=1e30 --optim.schedule=constant
goes_on "NaN at every step: the run gives up" 77 'not finite;skipped;--optim.lr' "${words[@]}" --resilience.max_skips=3
tiny "${good[@]}" --train.steps=6
goes_on "NaN with on_nan=stop" 77 'step 3' "${words[@]}" --inject 'kind=nan,step=3' --resilience.on_nan=stop
expect  "... and the good weights before it are saved" saved_as_logged

# ---------------------------------------------------------------- signals
for signal in INT TERM; do
    tiny "${good[@]}" --train.steps=1000000
    start "${words[@]}"
    expect "a run starts" wait_for 20 steps_done "$dir" 5
    kill -$signal $pid; finish
    expect "SIG$signal: exit code $code" test "$code" -eq $([ $signal = INT ] && echo 130 || echo 143)
    expect "SIG$signal: the last step is saved" saved_as_logged
    goes_on "SIG$signal: and resumed" 0 "" "${words[@]}" --train.steps=$(($(grep -c '"loss"' "$dir/metrics.jsonl") + 2))
done
# One step of 100,000 micro-batches takes long; the first signal waits for its end, the second does not.
tiny "${good[@]}" --train.global_batch=100000
start "${words[@]}"
wait_for 20 test -f "$dir/config.json"
sleep 0.5
kill -INT $pid; sleep 0.3
expect "first signal: the step is finished first" eval '! gone'
kill -INT $pid
expect "second signal: leaves at once" wait_for 2 gone
finish
expect "second signal: exit code $code" test "$code" -eq 130
expect "second signal: nothing is saved" test -z "$(ls "$dir/checkpoints" 2>/dev/null | grep '^step-')"

# ---------------------------------------------------------------- output for scripts
goes_on "inspect --json" 0 "" data inspect "$work/good.bin" --json
expect  "... is one object" sh -c "[ \$(wc -l <'$work/out') -eq 1 ] && grep -q '^{.*\"tokens\":400.*}\$' '$work/out' && [ ! -s '$work/err' ]"

echo "$((cases - failures)) of $cases cases of bad input handled"
[ "$failures" -eq 0 ]

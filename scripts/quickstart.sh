#!/usr/bin/env bash
# scripts/quickstart.sh [TEXT]   From nothing to a trained model in under ten minutes on two cores: installs what is missing,
# builds, prepares text, trains, stops, resumes from its own checkpoint, compares with a unigram model, prints a sample.
# TEXT is a file or a folder of text; without it the GNU dictionary of English is used (Debian package dict-gcide).
# Environment: QUICKSTART_DIR (default runs/quickstart), QUICKSTART_STEPS.
set -euo pipefail
text=${1:+$(realpath "$1")}
cd "$(dirname "$0")/.."
root=$PWD
dir=${QUICKSTART_DIR:-runs/quickstart}
steps=${QUICKSTART_STEPS:-1600}
started=$SECONDS
say() { printf '\n== %s  (%d s)\n' "$*" $((SECONDS - started)); }
die() { echo "quickstart: $*" >&2; exit 1; }
[ "$steps" -ge 200 ] || die "QUICKSTART_STEPS=$steps is too short to be interrupted half-way: at least 200"

say "packages and build"
scripts/install_packages.sh
# Without a GPU its half is left out, which takes most of the time to compile.
make NATIVE="${NATIVE:-1}" CUDA="$(nvidia-smi -L >/dev/null 2>&1 && echo auto || echo off)"
trifold=$root/build/trifold
mkdir -p "$dir"

if [ -z "$text" ]; then
    text=$dir/gcide.txt
    if [ ! -s "$text" ]; then
        say "text: the GNU dictionary of English"
        work=$(mktemp -d)
        trap 'rm -rf "$work"' EXIT
        (cd "$work" && chmod 755 . && apt-get download -q dict-gcide >/dev/null 2>&1 && dpkg-deb -x dict-gcide_*.deb .) ||
            die "cannot fetch the package dict-gcide; give a text file or folder instead: scripts/quickstart.sh TEXT"
        gzip -dc "$work"/usr/share/dictd/gcide.dict.dz >"$text.part" && mv "$text.part" "$text"
    fi
fi

say "tokens"
"$trifold" data tokenize "$text" --out "$dir/text" --format llmc --val 0.02

say "training $steps steps; it is interrupted half-way and resumes from its checkpoint"
options=(--config scripts/quickstart.json --run.dir="$dir/run" --train.steps="$steps"
         --data.train="$dir/text_train.bin" --data.val="$dir/text_val.bin")
rm -rf "$dir/run"
"$trifold" train "${options[@]}" &
pid=$!
half=$(printf 'step-%08d' $((steps / 200 * 100)))
while kill -0 "$pid" 2>/dev/null && [ ! -f "$dir/run/checkpoints/$half/manifest.json" ]; do sleep 0.2; done
kill -INT "$pid" 2>/dev/null || true
code=0; wait "$pid" || code=$?
[ "$code" -eq 130 ] || die "the first half of the training ended with exit code $code instead of 130 (interrupted, saved)"
say "resuming"
"$trifold" train "${options[@]}"

say "how good is it?"
loss=$("$trifold" eval --checkpoint "$dir/run" --data.val="$dir/text_val.bin" --json | sed -n 's/.*"loss": *\([0-9.]*\).*/\1/p')
unigram=$("$trifold" data unigram "$dir/text_train.bin" "$dir/text_val.bin" --json | sed -n 's/.*"loss": *\([0-9.]*\).*/\1/p')
awk -v loss="$loss" -v unigram="$unigram" 'BEGIN {
    printf "validation loss %.3f nats per byte; a unigram model has %.3f; ratio %.2f (must be at most 0.60)\n", loss, unigram, loss / unigram
    exit !(loss > 0 && unigram > 0 && loss <= 0.6 * unigram) }' || die "the model did not learn enough"

say "a sample"
"$trifold" sample --checkpoint "$dir/run" --prompt "${QUICKSTART_PROMPT:-Train}" --tokens 400 --temperature 0.7 --seed 7
say "done"

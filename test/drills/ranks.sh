# test/drills/ranks.sh   For drills that start several ranks; sourced with the path of trifold as argument. Sets trifold, compare and work.
trifold=$(realpath "${1:-build/trifold}")
compare=$(dirname "$trifold")/compare_runs
drill=$(basename "$0" .sh | sed 's/^run_//')
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
work=$(mktemp -d)
started=()  # processes in the background
clean_up() {
    for p in ${started[@]+"${started[@]}"}; do kill -9 "$p" 2>/dev/null || true; done
    rm -rf "$work"
}
trap clean_up EXIT
die() { echo "$drill: $*" >&2; exit 1; }
command -v mpirun >/dev/null || { echo "skipped: there is no mpirun here"; exit 0; }

# on_ranks N COMMAND...   None takes a minute; one that hangs fails the drill.
on_ranks() {
    local launcher=()
    [ "$1" -eq 1 ] || launcher=(mpirun --oversubscribe --bind-to none -n "$1")
    timeout -k 10 600 ${launcher[@]+"${launcher[@]}"} "${@:2}"
}
# tokens NAME SEED: makes $work/NAME.bin of 4,097 tokens
tokens() {
    RANDOM=$2
    for _ in $(seq 512); do printf '%08x' $((RANDOM * RANDOM)); done >"$work/$1.txt"
    "$trifold" data tokenize "$work/$1.txt" --out "$work/$1" --format llmc >"$work/log" 2>&1 || die "tokenize: $(tail -n 1 "$work/log")"
}
# asks ABOUT ARGS...: compare_runs must say yes
asks() {
    local about=$1
    shift
    "$compare" "$@" >"$work/answer" 2>&1 || die "$about: compare_runs $1: $(cat "$work/answer")"
}

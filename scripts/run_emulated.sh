#!/usr/bin/env bash
# scripts/run_emulated.sh BUILD   The CUDA half on the emulator in all its modes, on all cores at once: shared memory full of NaN under
# every schedule and several seeds, address and undefined-behaviour sanitizers, the race detector; then the coverage of device lines.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
build=$(realpath "${1:-build}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export build work
find "$build/emulation/asan" -name '*.gcda' -delete 2>/dev/null

# NAME  SCHEDULE  SEED  PROGRAM  TESTS: long ones first. The trainer is the same whatever the schedule of threads inside a kernel is.
cat >"$work/jobs" <<'END'
asan warp_priority 1 emulated_asan ~[long]
race warp_priority 1 emulated_race ~[long]
whole-training warp_priority 1 emulated_clang [trainer]
lifo lifo 1 emulated_clang ~[trainer]
fifo fifo 1 emulated_clang ~[trainer]
random random 2 emulated_clang ~[trainer]
warps-2 warp_priority 2 emulated_clang ~[trainer]
warps-3 warp_priority 3 emulated_clang ~[trainer]
warps-4 warp_priority 4 emulated_clang ~[trainer]
warps-5 warp_priority 5 emulated_clang ~[trainer]
END
run_job() {  # run_job NAME SCHEDULE SEED PROGRAM TESTS
    local start=$SECONDS rc=0
    [ -x "$build/$4" ] || { echo "$1: $4 was not built" >"$work/$1.skipped"; return; }
    OMP_NUM_THREADS=1 UBSAN_OPTIONS=print_stacktrace=1 EMULATION_SCHEDULE=$2 EMULATION_SEED=$3 "$build/$4" "$5" >"$work/$1.log" 2>&1 || rc=$?
    if [ $rc -eq 0 ]; then
        echo "$1: $(grep -v '^ *$' "$work/$1.log" | tail -n 1), $((SECONDS - start)) s"
    else
        echo "$1: exit code $rc" >"$work/$1.failed"
        tail -n 40 "$work/$1.log"
        cat "$work/$1.failed"
    fi
}
export -f run_job
xargs -P "$(nproc)" -L 1 bash -c 'run_job "$@"' _ <"$work/jobs"
status=0
for file in "$work"/*.skipped; do [ -e "$file" ] && cat "$file"; done
for file in "$work"/*.failed; do [ -e "$file" ] && status=1; done
if [ $status -eq 0 ] && [ -x "$build/emulated_asan" ]; then
    scripts/coverage_device.sh "$build" || status=1
fi
exit $status

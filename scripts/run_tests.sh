#!/usr/bin/env bash
# scripts/run_tests.sh BUILD   Runs every test of a finished build. The last line reads "N passed, N failed".
# A test is a command; it passes when it exits 0. Output of failed ones is shown.
set -uo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
passed=0 failed=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT

run() {  # run NAME COMMAND...
    local name=$1 start=$SECONDS
    shift
    printf '%-34s ' "$name"
    if "$@" >"$log" 2>&1; then
        passed=$((passed + 1))
        printf 'ok      %3d s  %s\n' $((SECONDS - start)) "$(tail -n 1 "$log" | cut -c1-90)"
    else
        failed=$((failed + 1))
        printf 'FAILED  %3d s\n' $((SECONDS - start))
        tail -n 60 "$log" | sed 's/^/    /'
    fi
}

run "includes point downwards"      scripts/check_includes.sh
for tests in "$build"/test_*; do
    [ -x "$tests" ] && run "unit: $(basename "$tests" | sed 's/^test_//')" "$tests"
done
if [ -x "$build/emulated_clang" ] || [ -x "$build/emulated_asan" ]; then
    for arch in 80 89 90a; do run "GPU half: device code, sm_$arch" scripts/check_device_code.sh "$build" $arch; done
    run "GPU half: on the emulator" scripts/run_emulated.sh "$build"
fi
run "golden: Hugging Face parity"   test/golden/run_golden.sh "$build/trifold"
run "bad input"                     test/drills/bad_input.sh "$build/trifold"
run "kill -9 and resume"            test/drills/kill_resume.sh "$build/trifold"
for drill in test/drills/run_*.sh; do
    [ -x "$drill" ] && run "$(basename "$drill" .sh | sed 's/^run_//; s/_/ /g')" "$drill" "$build/trifold"
done

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]

#!/usr/bin/env bash
# scripts/coverage_device.sh BUILD   Which lines of kernels/cuda/*.{cu,cuh,h} ran in BUILD/emulated_asan, which must have run:
# the share of each file and of all, and the lines that did not. A line of a template counts as run when any instance ran
# it. Exit code 1 below 95 % in all.
set -euo pipefail
cd "$(dirname "$0")/.."
build=$(realpath "${1:-build}")
least=95

objects=$(find "$build/emulation/asan" -name '*.gcda')
[ -n "$objects" ] || { echo "no coverage in $build/emulation/asan: run $build/emulated_asan first"; exit 1; }
complaints=$(mktemp)
trap 'rm -f "$complaints"' EXIT
text=$(xargs gcov --stdout <<<"$objects" 2>"$complaints")
if grep -q mismatch "$complaints"; then
    echo "the results belong to an older build: remove the .gcda files of $build/emulation/asan and run emulated_asan again"
    exit 1
fi
# In gcov's text a line reads "count: number: source"; count is - where there is no code and ##### or ===== where it never ran.
awk -v least="$least" '
    /^ *-: +0:Source:/ { file = $0; sub(/^.*Source:/, "", file); wanted = file ~ /kernels\/cuda\/[a-z0-9_]*\.(cu|cuh|h)$/; sub(/^.*kernels\//, "kernels/", file) }
    !wanted || /^ *-: / { next }
    {
        split($0, part, ":"); count = part[1]; gsub(/ /, "", count); line = part[2] + 0
        if (line == 0 || count == "") next
        key = file ":" line
        if (!(key in ran)) { ran[key] = 0; ++lines[file] }
        if (count !~ /^[#=]/ && !ran[key]) { ran[key] = 1; ++executed[file] }
    }
    END {
        most_lines = "sort -t: -k2,2 -k3,3n | head -n 60"
        for (f in lines) {
            all += lines[f]; good += executed[f]
            printf "%-46s %4d of %4d lines  %5.1f %%\n", f, executed[f], lines[f], 100 * executed[f] / lines[f] | "sort"
        }
        close("sort")
        for (k in ran) if (!ran[k]) print "  not run: " k | most_lines
        close(most_lines)
        if (all == 0) { print "no lines of kernels/cuda in the coverage data"; exit 1 }
        printf "%d of %d device lines ran in the emulator: %.1f %% (at least %d)\n", good, all, 100 * good / all, least
        exit 100 * good < least * all
    }' <<<"$text"

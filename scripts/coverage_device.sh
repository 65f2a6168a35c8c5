#!/usr/bin/env bash
# scripts/coverage_device.sh BUILD   Which lines of kernels/cuda/*.{cu,cuh,h} ran in BUILD/emulated_asan, which must have run:
# the share of each file and of all, and the lines that did not. A line of a template counts as run when any instance ran
# it. Exit code 1 below 95 % in all. Older results are removed with: find BUILD/emulation/asan -name '*.gcda' -delete
set -euo pipefail
cd "$(dirname "$0")/.."
build=$(realpath "${1:-build}")
least=95

objects=$(find "$build/emulation/asan" -name '*.gcda')
[ -n "$objects" ] || { echo "no coverage in $build/emulation/asan: run $build/emulated_asan first"; exit 1; }
# In gcov's text a line reads "count: number: source"; count is - where there is no code and ##### or ===== where it never ran.
xargs gcov --stdout <<<"$objects" 2>/dev/null | awk -v least="$least" '
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
        for (f in lines) {
            all += lines[f]; good += executed[f]
            printf "%-46s %4d of %4d lines  %5.1f %%\n", f, executed[f], lines[f], 100 * executed[f] / lines[f] | "sort"
        }
        close("sort")
        for (k in ran) if (!ran[k]) print "  not run: " k | "sort -t: -k2,2 -k3,3n"
        close("sort -t: -k2,2 -k3,3n")
        if (all == 0) { print "no lines of kernels/cuda in the coverage data"; exit 1 }
        printf "%d of %d device lines ran in the emulator: %.1f %% (at least %d)\n", good, all, 100 * good / all, least
        exit 100 * good < least * all
    }'

#!/usr/bin/env bash
# scripts/check_includes.sh   Proves that includes point only downwards (base < kernels < parallel < model, checkpoint, data < commands),
# and that headers which .cu files may include stay free of libraries that nvcc cannot read. Prints every violation; exit code 1.
set -euo pipefail
cd "$(dirname "$0")/.."

status=0
forbid() {  # forbid FOLDER PATTERN REASON
    [ -d "$1" ] || return 0
    if grep -rnE "^#include $2" "$1" --include=*.h --include=*.cpp --include=*.cu --include=*.cuh; then
        echo "  ^ $3"
        status=1
    fi
}
forbid base       '"(kernels|parallel|model|checkpoint|data|commands)/'  'base/ is the lowest layer'
forbid kernels    '"(parallel|model|checkpoint|data|commands)/'          'kernels/ may include only base/'
forbid parallel   '"(model|checkpoint|data|commands)/'                   'parallel/ may include only kernels/ and base/'
forbid model      '"(checkpoint|data|commands)/'                         'model/ may not include checkpoint/, data/ or commands/'
forbid checkpoint '"(data|commands)/'                                    'checkpoint/ may not include data/ or commands/'
forbid data       '"(checkpoint|commands)/'                              'data/ may not include checkpoint/ or commands/'

# What a .cu file sees, directly or through headers.
for source in $(git ls-files -co --exclude-standard '*.cu'); do
    if g++ -std=c++20 -I. -x c++ -M -MG "$source" | tr -s ' \\' '\n' | grep -E '(^|/)(fmt|nlohmann|mpi)[./]'; then
        echo "  ^ $source must not include fmt, JSON or MPI, not even through a header"
        status=1
    fi
done
[ $status -eq 0 ] && echo "includes point downwards only"
exit $status

#!/usr/bin/env bash
# scripts/check_device_code.sh BUILD [ARCH]   Reads what nvcc made of every kernel, for sm_90a or another ARCH (80, 89): fails on warnings,
# stack frames and spills, and where a kernel of the table below lacks the instructions it was written for. Results are kept in
# BUILD/device_code/ARCH and made anew when a source changes; the whole table is kernels.txt there.
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build}
arch=${2:-90a}
out=$build/device_code/$arch
nvcc=${NVCC:-$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)}
mkdir -p "$out"

# "file: name<types" as a regular expression               what each instance must hold
required='
activation: .*, [48]>                                      load16 store16
rotary: turn<.*, [48]>                                     load16 store16
norm: .*, [48]>                                            load16 store16
head_norm: .*, [48]>                                       load16 store16
embedding: (gather|add_runs)<.*, [48]>                     load16 store16
linear: column_sums<.*, [48]>                              load16
cross_entropy: (|stats_)rows<.*, [48]>                     load16
cross_entropy: combine_rows<.*, [48]>                      load16
cross_entropy: combine_rows<(.*), \1, [48]>                store16
optimizer: (adamw|direction|update)_chunks<4>              load16 store16
optimizer: sum_squares<4>                                  load16
utility: add_kernel<(.*), \1, [48]>                        load16 store16
utility: sum_parts_kernel<.*, [48]>                        load16 store16
utility: extend_cache_kernel<.*, [48]>                     load16 store16
attention_forward: attention::forward<                     cp_async ldmatrix mma store16
attention_backward: attention::backward<                   cp_async ldmatrix mma load16 store16
attention_forward_fp32: attention::forward<                load16
attention_backward_fp32: attention::(key|query)_gradients< load16
'

compile() {  # compile NAME: NAME.ptx and NAME.log, unless they are newer than all sources
    local name=$1 source=kernels/cuda/$1.cu log=$out/$1.log keep
    if [ -f "$log" ] && [ -z "$(find kernels/cuda kernels/*.h base/*.h -newer "$log" -print -quit)" ]; then return; fi
    keep=$(mktemp -d)
    if "$nvcc" -std=c++20 -O3 --expt-relaxed-constexpr -gencode arch=compute_$arch,code=sm_$arch -Xptxas -v -Xcompiler=-Wall,-Wextra,-Wno-missing-field-initializers \
        -I. -keep -keep-dir "$keep" -c "$source" -o "$keep/$name.o" >"$log.new" 2>&1; then
        c++filt <"$keep/$name.ptx" >"$out/$name.ptx"
        c++filt <"$log.new" >"$log"
        rm -rf "$keep" "$log.new"
    else
        cat "$log.new"
        rm -rf "$keep" "$log.new"
        return 1
    fi
}
export -f compile
export arch out nvcc

names=$(basename -s .cu kernels/cuda/*.cu)
# shellcheck disable=SC2016
echo "$names" | xargs -P "${JOBS:-$(nproc)}" -I{} bash -euo pipefail -c 'compile {}'

# One line a kernel: "file: name", registers, stack, spills, and how often each kind of instruction occurs.
for name in $names; do
    awk -v file="$name" '
        function short(s) {  # the name without result, namespaces and arguments
            gsub(/\(anonymous namespace\)::/, "", s); gsub(/trifold::(cuda::)?/, "", s)
            sub(/^ *void /, "", s)
            depth = 0
            for (i = 1; i <= length(s); ++i) {
                c = substr(s, i, 1)
                if (c == "<") ++depth
                if (c == ">") --depth
                if (c == "(" && depth == 0) return substr(s, 1, i - 1)
            }
            return s
        }
        FILENAME ~ /\.log$/ && /Compiling entry function/ { split($0, part, "\x27"); kernel = short(part[2]); order[++count] = kernel }
        FILENAME ~ /\.log$/ && /bytes stack frame/ { stack[kernel] = $1; spills[kernel] = $5 + $9 }
        FILENAME ~ /\.log$/ && /Used [0-9]+ registers/ { match($0, /Used [0-9]+/); registers[kernel] = substr($0, RSTART + 5, RLENGTH - 5) }
        FILENAME ~ /\.ptx$/ && /\.entry/ { s = $0; sub(/.*\.entry */, "", s); kernel = short(s) }
        FILENAME ~ /\.ptx$/ && /ld\.global[a-z0-9.:_]*\.(v4\.[a-z]32|v8\.[a-z]32|v2\.[a-z]64)/ { ++load16[kernel] }
        FILENAME ~ /\.ptx$/ && /st\.global[a-z0-9.:_]*\.(v4\.[a-z]32|v8\.[a-z]32|v2\.[a-z]64)/ { ++store16[kernel] }
        FILENAME ~ /\.ptx$/ && /cp\.async\.[a-z.]*shared/ { ++cp_async[kernel] }
        FILENAME ~ /\.ptx$/ && /ldmatrix\.sync/ { ++ldmatrix[kernel] }
        FILENAME ~ /\.ptx$/ && /mma\.sync|mma_async/ { ++mma[kernel] }
        END {
            for (k = 1; k <= count; ++k) {
                kernel = order[k]
                printf "%-100s registers=%d stack=%d spills=%d load16=%d store16=%d cp_async=%d ldmatrix=%d mma=%d\n", file ": " kernel, registers[kernel],
                    stack[kernel], spills[kernel], load16[kernel], store16[kernel], cp_async[kernel], ldmatrix[kernel], mma[kernel]
            }
        }' "$out/$name.log" "$out/$name.ptx"
done >"$out/kernels.txt"

status=0
complain() {
    echo "  $1"
    status=1
}
while IFS= read -r line; do complain "warning: $line"; done < <(grep -hiE "warning" "$out"/*.log || true)
while IFS= read -r line; do complain "local memory: $line"; done < <(grep -vE "stack=0 spills=0 " "$out/kernels.txt" || true)
while read -r pattern; do
    [ -n "$pattern" ] || continue
    expression=$(sed -E 's/ *( (load16|store16|cp_async|ldmatrix|mma))+$//' <<<"$pattern")
    needed=${pattern#"$expression"}
    matching=$(grep -E "^$expression" "$out/kernels.txt" || true)
    [ -n "$matching" ] || complain "no kernel matches '$expression'"
    for instruction in $needed; do
        while IFS= read -r line; do
            if grep -qE "$instruction=0( |\$)" <<<"$line"; then complain "no $instruction: $line"; fi
        done <<<"$matching"
    done
done <<<"$required"
echo "$(wc -l <"$out/kernels.txt") kernels for sm_$arch, $([ $status -eq 0 ] && echo "all as they should be" || echo "see above")"
exit $status

#!/usr/bin/env bash
# scripts/scaling_sweep.sh [LAYOUTS] [options] [-- COMMON FLAGS...]   Trains a few steps in each of several layouts and compares them.
#
#   scripts/scaling_sweep.sh                                                 a small model in the layouts of up to four ranks
#   scripts/scaling_sweep.sh layouts.txt -- --config run.json --train.global_batch=64
#   LAUNCH=none scripts/netns_cluster.sh 4 200mbit -- scripts/scaling_sweep.sh layouts.txt -- --config run.json
#
# LAYOUTS holds one layout a line: an optional name and a colon, then flags of trifold; # begins a comment.
#   dp 4, no overlap: --mesh.dp=4 --overlap.dp=off
#   --mesh.tp=2 --mesh.pp=2 --mesh.schedule=zero_bubble
# The number of ranks is the product of mesh.tp, pp, cp and dp in the line; a word ranks=N says it where that is not so. COMMON FLAGS
# come before those of the line; give a train.global_batch there, so that all layouts do the same work.
#
#   --steps N [8]  --warmup N [2]: steps left out of medians  --limit SECONDS [600] for each layout  --out FOLDER [runs/sweep-DATE-TIME]
#   --trifold PROGRAM [build/trifold]  --keep: keep checkpoints  --dry-run: only print the commands
#   Environment: MPIRUN ["mpirun --oversubscribe --bind-to none"], for example "srun"; one rank is started without it.
#
# Writes FOLDER/table.md (also printed), sweep.tsv, sweep.svg, and one run directory and log per layout. Times are medians; speed-up is
# against the first layout that worked; efficiency is speed-up over the ratio of ranks. exposed: seconds of the step in which a rank
# waited for that axis (the slowest rank's). Exit code 1 when a layout failed; the others are still compared.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source=/dev/null
. "$root/scripts/measure.sh"
die() { echo "scaling_sweep: $*" >&2; exit 2; }

layouts='' steps=8 warmup=2 limit=600 out=runs/sweep-$(date +%Y%m%d-%H%M%S) trifold=$root/build/trifold keep=no dry_run=no common=()
read -ra mpirun <<<"${MPIRUN:-mpirun --oversubscribe --bind-to none}"
while [ $# -gt 0 ]; do
    case $1 in
        --steps | --warmup | --limit | --out | --trifold)
            [ $# -ge 2 ] || die "$1 needs a value"
            printf -v "${1#--}" %s "$2"
            shift ;;
        --keep) keep=yes ;;
        --dry-run) dry_run=yes ;;
        --) shift; common=("$@"); break ;;
        -*) die "unknown option $1; flags of trifold come after --" ;;
        *) [ -z "$layouts" ] || die "one file of layouts, please; flags of trifold come after --"
           layouts=$1 ;;
    esac
    shift
done
[[ $steps =~ ^[0-9]+$ && $warmup =~ ^[0-9]+$ && $limit =~ ^[0-9]+$ ]] || die "--steps, --warmup and --limit are whole numbers"
[ "$steps" -gt "$warmup" ] || die "--steps=$steps leaves nothing after --warmup=$warmup"
[ -z "$layouts" ] || [ -r "$layouts" ] || die "cannot read the layouts in $layouts"
[ -x "$trifold" ] || [ $dry_run = yes ] || die "$trifold is not there: make, or --trifold PROGRAM"
[ ! -e "$out/sweep.tsv" ] || die "$out holds another sweep, whose runs would be resumed: remove it or choose another --out"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
axes="dp tp pp ep cp"

default_layouts() {
    cat <<'EOF'
1 rank:
dp 2: --mesh.dp=2
pp 2: --mesh.pp=2
tp 2: --mesh.tp=2
dp 2, pp 2: --mesh.dp=2 --mesh.pp=2
tp 2, pp 2: --mesh.tp=2 --mesh.pp=2
EOF
}
# The default model learns the repository's own texts, as bytes.
default_flags() {
    [ $dry_run = yes ] || "$trifold" data tokenize "$root/README.md" "$root/docs" --out "$out/text" --format llmc >"$out/tokenize.log" 2>&1 ||
        { cat "$out/tokenize.log" >&2; die "no data: give flags of trifold after --"; }
    common=(--model.preset=tiny-llama --model.layers=4 --train.dtype=fp32 --train.micro_batch=1 --train.global_batch=8 --data.train="$out/text.bin")
}

# ---------------------------------------------------------------- one layout
ranks_of() {  # ranks_of WORD...: ranks=N, else the product of the mesh
    local word ranks=1
    for word in "$@"; do
        case $word in
            ranks=*) echo "${word#ranks=}"; return ;;
            --mesh.tp=* | --mesh.pp=* | --mesh.cp=* | --mesh.dp=*) ranks=$((ranks * ${word#*=})) ;;
        esac
    done
    echo "$ranks"
}

trained() { grep -sc '"loss"' "$1/metrics.jsonl" || [ -e "$1/metrics.jsonl" ] || echo 0; }

pid=
trap '[ -z "$pid" ] || kill -TERM "$pid" 2>/dev/null; exit 130' INT TERM
# Shows progress where somebody is looking. The exit code is that of the command.
watch_run() {  # watch_run TITLE RUN_DIR LOG COMMAND...
    local title=$1 run=$2 log=$3 code=0
    shift 3
    timeout -k 10 "$limit" "$@" >"$log" 2>&1 </dev/null &
    pid=$!
    while [ -t 2 ] && kill -0 "$pid" 2>/dev/null; do
        printf '\r%s  step %s of %s ' "$title" "$(trained "$run")" "$steps" >&2
        sleep 0.3
    done
    wait "$pid" || code=$?
    pid=
    [ ! -t 2 ] || printf '\r\033[K' >&2
    return $code
}

measured() {  # measured RUN_DIR: step_s tokens_per_s, exposed_s of each axis, bubble_s, loss, grad_norm
    local rows=$1/rows axis step_s
    grep '"loss"' "$1/metrics.jsonl" >"$rows.all"
    tail -n +$((warmup + 1)) "$rows.all" >"$rows"
    step_s=$(field step_s "$rows" | median)
    printf '%s\t%s' "$step_s" "$(awk -v tokens="$(field tokens "$rows" | median)" -v s="$step_s" 'BEGIN { print tokens / s }')"
    for axis in $axes bubble_s; do printf '\t%s' "$(field "$axis" "$rows" | median)"; done
    printf '\t%s\t%s\n' "$(field loss "$rows" | tail -n 1)" "$(field grad_norm "$rows" | tail -n 1)"
    rm -f "$rows" "$rows.all"
}

# The end of a log without what mpirun adds.
last_words() { awk '/^-----------/ { boxed = !boxed; next } !boxed && NF && !/^(mpirun:|\[[^ ]*:[0-9]+\])/' "$1" | tail -n 6 | sed 's/^/    /'; }

one_layout() {  # one_layout NUMBER OF NAME WORD...; a line of sweep.tsv: name ranks status, then measured()
    local title="[$1/$2] $3" name=$3 folder code=0 ranks word
    local -a flags=() command
    folder=$out/$(printf 'layout-%02d' "$1")
    shift 3
    ranks=$(ranks_of "$@") || die "$name: sizes of the mesh are whole numbers"
    for word in "$@"; do [[ $word == ranks=* ]] || flags+=("$word"); done
    command=("$trifold" train "${common[@]}" --train.steps="$steps" --run.tensorboard=off --run.dir="$folder" "${flags[@]}")
    [ "$ranks" -eq 1 ] || command=("${mpirun[@]}" -n "$ranks" "${command[@]}")
    if [ $dry_run = yes ]; then printf '%s:' "$name"; printf ' %q' "${command[@]}"; echo; return 0; fi
    [ -t 2 ] || echo "$title" >&2
    watch_run "$title" "$folder" "$folder.log" "${command[@]}" || code=$?
    [ $keep = yes ] || rm -rf "$folder/checkpoints"
    if [ $code -eq 0 ] && [ "$(trained "$folder")" -le "$warmup" ]; then code="0, but only $(trained "$folder") steps in metrics.jsonl"; fi
    if [ "$code" != 0 ]; then
        [ "$code" != 124 ] || code="124, more than $limit s"
        { echo "$title FAILED (exit code $code), see $folder.log:"; last_words "$folder.log"; } >&2
        printf '%s\t%s\tfailed (exit code %s)\n' "$name" "$ranks" "$code" >>"$out/sweep.tsv"
        return 0
    fi
    printf '%s\t%s\tok\t%s\n' "$name" "$ranks" "$(measured "$folder")" >>"$out/sweep.tsv"
    tail -n 1 "$out/sweep.tsv" | awk -F'\t' -v t="$title" '{ printf "%s: %.4g s per step, %.0f tokens/s\n", t, $4, $5 }' >&2
}

# ---------------------------------------------------------------- results
# Columns of sweep.tsv: 1 name, 2 ranks, 3 status, 4 step_s, 5 tokens/s, 6-10 exposed dp tp pp ep cp, 11 bubble, 12 loss, 13 grad norm
table() {
    awk -F'\t' '
        function num(x, format) { return x == "nan" ? "-" : sprintf(format, x) }
        BEGIN {
            print "| layout | ranks | step s | tokens/s | speed-up | efficiency | exposed s: dp | tp | pp | ep | cp | bubble s | loss | grad norm |"
            print "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
        }
        $3 != "ok" { printf "| %s | %s | %s | | | | | | | | | | | |\n", $1, $2, $3; next }
        {
            if (!base) { base = $5; base_ranks = $2 }
            printf "| %s | %s | %.4g | %.0f | %.2f | %.0f %% |", $1, $2, $4, $5, $5 / base, 100 * $5 / base * base_ranks / $2
            for (i = 6; i <= 11; i++) printf " %s |", num($i, "%.3g")
            printf " %s | %s |\n", num($12, "%.6f"), num($13, "%.5f")
        }' "$out/sweep.tsv"
}

# Bars of seconds per step, made of the exposed seconds of each axis and the rest.
plot() {
    awk -F'\t' -v axes="$axes bubble" -v header="$header" '
        function text(x, y, size, color, anchor, s) {
            gsub(/&/, "\\&amp;", s); gsub(/</, "\\&lt;", s); gsub(/>/, "\\&gt;", s)
            printf "<text x=\"%.1f\" y=\"%.1f\" font-size=\"%d\" fill=\"%s\" text-anchor=\"%s\">%s</text>\n", x, y, size, color, anchor, s
        }
        function box(x, y, w, h, color) { printf "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.1f\" fill=\"%s\"/>\n", x, y, w, h, color }
        BEGIN { n_axes = split(axes, axis, " "); split("#d1495b #edae49 #00798c #8f5fbf #6a994e #b8bec6", color, " "); compute = "#30638e" }
        {
            rows++; name[rows] = $1; ranks[rows] = $2; status[rows] = $3
            if (length($1) > longest) longest = length($1)
            if ($3 != "ok") next
            if (!base) base = $5
            step[rows] = $4; rate[rows] = $5; speed[rows] = $5 / base
            if ($4 > most) most = $4
            for (i = 1; i <= n_axes; i++) { part[rows, i] = ($(5 + i) > 0) ? $(5 + i) : 0; used[i] += part[rows, i] }
        }
        END {
            left = 28 + 7.6 * (longest > 12 ? longest : 12); bars = 420; row = 34; top = 92; right = 250
            width = left + bars + right; if (width < 820) width = 820
            height = top + rows * row + 40
            printf "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" width=\"%d\" height=\"%d\" font-family=\"Helvetica, Arial, sans-serif\">\n", width, height, width, height
            printf "<rect width=\"%d\" height=\"%d\" fill=\"white\"/>\n", width, height
            text(24, 30, 18, "#222", "start", "Seconds per step by layout")
            text(24, 50, 11, "#777", "start", header)
            x = 24
            box(x, 64, 11, 11, compute); text(x + 16, 74, 12, "#444", "start", "computing"); x += 96
            for (i = 1; i <= n_axes; i++) if (used[i] > 0) {
                label = axis[i] == "bubble" ? "pipeline bubble" : axis[i] " exposed"
                box(x, 64, 11, 11, color[i]); text(x + 16, 74, 12, "#444", "start", label); x += 34 + 7 * length(label)
            }
            # Grid lines at 1, 2 or 5 times a power of ten, at most 6 of them.
            unit = 10 ^ int(log(most > 0 ? most : 1) / log(10) - 2)
            while (most / unit > 6) unit *= (++turn % 3 == 2) ? 2.5 : 2
            for (t = 0; most > 0 && t <= most * 1.0001; t += unit) {
                gx = left + bars * t / most
                printf "<line x1=\"%.1f\" y1=\"%d\" x2=\"%.1f\" y2=\"%d\" stroke=\"#e6e6e6\"/>\n", gx, top, gx, top + rows * row
                text(gx, top + rows * row + 18, 11, "#777", "middle", sprintf("%g s", t))
            }
            for (r = 1; r <= rows; r++) {
                y = top + (r - 1) * row
                text(left - 10, y + 15, 13, "#222", "end", name[r]); text(left - 10, y + 28, 10, "#888", "end", ranks[r] (ranks[r] == 1 ? " rank" : " ranks"))
                if (status[r] != "ok") { text(left + 6, y + 21, 13, "#b00020", "start", status[r]); continue }
                rest = step[r]
                for (i = 1; i <= n_axes; i++) rest -= part[r, i]
                if (rest < 0) rest = 0  # maxima over ranks may add up to more than the step
                x = left; box(x, y + 5, bars * rest / most, 22, compute); x += bars * rest / most
                for (i = 1; i <= n_axes; i++) if (part[r, i] > 0 && x < left + bars * step[r] / most) {
                    w = bars * part[r, i] / most; if (x + w > left + bars * step[r] / most) w = left + bars * step[r] / most - x
                    box(x, y + 5, w, 22, color[i]); x += w
                }
                text(left + bars * step[r] / most + 8, y + 21, 12, "#222", "start", sprintf(step[r] < 100 ? "%#.3g s, %.0f tokens/s, %.2fx" : "%.0f s, %.0f tokens/s, %.2fx", step[r], rate[r], speed[r]))
            }
            print "</svg>"
        }' "$out/sweep.tsv"
}

# ---------------------------------------------------------------- the sweep
mapfile -t lines < <({ if [ -n "$layouts" ]; then cat "$layouts"; else default_layouts; fi; } | sed 's/#.*//; s/^[[:space:]]*//; s/[[:space:]]*$//; /^$/d')
[ ${#lines[@]} -gt 0 ] || die "there is no layout in $layouts"
[ $dry_run = yes ] || mkdir -p "$out" || die "cannot make $out"
[ ${#common[@]} -gt 0 ] || default_flags
[ $dry_run = yes ] || : >"$out/sweep.tsv"
number=0
for line in "${lines[@]}"; do
    number=$((number + 1))
    # A name ends at the first colon that is not part of a flag.
    name=${line//--mesh./} rest=$line
    if [[ $line =~ ^([^-=:][^=:]*):[[:space:]]*(.*)$ ]]; then name=${BASH_REMATCH[1]} rest=${BASH_REMATCH[2]}; fi
    read -ra words <<<"$rest"
    one_layout "$number" "${#lines[@]}" "$name" "${words[@]}"
done
[ $dry_run = no ] || exit 0

cpu=$(lscpu | sed -n 's/^Model name: *//p' | sed -n 1p)
header="$(date +%F), $(nproc) cores of $cpu, commit $(git -C "$root" rev-parse --short HEAD 2>/dev/null || echo none); medians of $((steps - warmup)) steps after $warmup of warm-up"
table >"$out/table.md"
plot >"$out/sweep.svg"
printf '%s\n\n' "$header"
cat "$out/table.md"
printf '\n%s\n' "$out/table.md, $out/sweep.tsv, $out/sweep.svg"
failed=$(grep -c '	failed' "$out/sweep.tsv" || true)
[ "$failed" -eq 0 ] || { echo "scaling_sweep: $failed of ${#lines[@]} layouts failed, see above" >&2; exit 1; }

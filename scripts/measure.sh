# scripts/measure.sh   What bench.sh and gpu_check.sh share; sourced, not run.

field() { sed -n "s/.*\"$1\": *\(-\{0,1\}[0-9.][0-9.e+-]*\).*/\1/p" "$2"; }  # every number with this key, one a line
median() { sort -g | awk '{ x[NR] = $1 } END { if (NR) print (x[int((NR + 1) / 2)] + x[int(NR / 2) + 1]) / 2; else print "nan" }'; }
# A token file in the llm.c format on standard output: header, then a million random ids below 50,116, 2 bytes each.
random_tokens() {
    printf '\210\330\064\001\001\000\000\000\100\102\017\000'  # 20240520, version 1, 1,000,000 tokens
    head -c 1012 /dev/zero
    head -c 2000000 /dev/urandom | LC_ALL=C tr '\304-\377' '\000-\073'
}

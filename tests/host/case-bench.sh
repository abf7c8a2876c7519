# shellcheck shell=bash disable=SC2154  # lib.sh sets them
# make bench works: every job has a row and a plot. Its times mean nothing here and are not checked.

# Not a release build: unit tests have built most of this one.
bench() { (cd "$root" && cargo run --quiet --package xtask -- bench --quick --out "$work/bench" --only "$1"); }

case_bench() {
    local job left
    left=$(echo /dev/shm/thruway-bench.* "$root"/target/thruway-bench.*)
    mkdir "$work/bench"
    printf '%s\n' 'a line by hand' '<!-- make bench writes from here -->' 'an old row' \
        '<!-- make bench writes to here -->' 'another' >"$work/bench/benchmarks.md"
    # Not every table: the others differ only in the guest. The second run keeps what the first one measured.
    bench frontend,qemu,passthrough,build-always || fail "make bench --quick ended with status $?"
    bench uml,names,seen || fail "make bench --quick ended with status $?"
    grep -q '^## ' "$work/bench/benchmarks.md" || fail 'benchmarks.md has no table'
    [[ $(sed -n '1p;$p' "$work/bench/benchmarks.md") == $'a line by hand\nanother' ]] || fail 'lines written by hand were lost'
    if grep -q 'an old row' "$work/bench/benchmarks.md"; then fail 'the old figures are still there'; fi
    for job in 'write 4k, sequential' 'read 4k, sequential' 'read 4k, random' 'write 4k, random' 'mmap read 4k, random' \
        'first touch of a 2 MiB range, p50' 'overwrite 4k, random' 'overwrite 128k, sequential' 'unpack and build' \
        'read 128k, 8 jobs' 'read 1M, O_DIRECT, 4 jobs' 'create, 8 processes' 'stat, cold' 'readdir and stat, cold' \
        'open and close' unlink 'second git status' 'tar x' 'a change on the host is seen by stat, p99'; do
        # One table has figures, another has ratios.
        (($(grep -cE "^\| $job.*[0-9]" "$work/bench/benchmarks.md") >= 2)) || fail "no rows of '$job'"
        grep -q "^$job" "$work"/bench/plots/*.svg || fail "no panel of '$job'"
    done
    grep -q '^thruwayd, passthrough: the first OPEN of the file' "$work/bench/benchmarks.md" || fail 'no time of the first OPEN'
    (($(grep -cE '^\| (getattr|readdirplus|create), depth 1 .*[0-9]' "$work/bench/benchmarks.md") == 3)) || fail 'no rows without a guest'
    for job in thruwayd 'virtiofsd, logging'; do
        # The most frequent one comes first. On a slow machine attributes time out, and it is another one.
        grep -q "^$job: .* % over tmpfs.* messages.* LOOKUP [0-9]" "$work/bench/benchmarks.md" || fail "no messages of $job"
    done
    grep -q '^thruwayd: the median row [0-9]' "$work/bench/benchmarks.md" || fail 'no median of the rows'
    tail -n 1 "$work/bench/plots/qemu.svg" | grep -q '</svg>' || fail 'the plot is cut off'

    if THRUWAY_DAEMON=/bin/false bench frontend >"$work/out" 2>&1; then fail 'a failing daemon was not reported'; fi
    grep -q '^bench: /bin/false .*: it ended (exit status: 1)' "$work/out" || fail "wrong error message: $(cat "$work/out")"
    [[ $(echo /dev/shm/thruway-bench.* "$root"/target/thruway-bench.*) == "$left" ]] || fail 'make bench left a share behind'
}

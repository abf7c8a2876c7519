# shellcheck shell=bash disable=SC2154  # lib.sh sets them
# Suites and loads that others wrote: pjdfstest, fsx, fio, stress-ng.

# virtiofsd passes this many tests, so this many must pass.
pjdfstest_passed=382
# Linux's FUSE sends O_RDONLY | O_TRUNC to the server before it checks whether the file is being executed. The program may crash
# before the check: on a busy machine 1 of 10 runs, with virtiofsd too.
pjdfstest_racy=open::etxtbsy

# pjdfstest_run NAME KIND DAEMON [BOOT-ARGUMENT...]: writes $work/NAME.results, with a test and its result in each line.
pjdfstest_run() {
    local name=$1 kind=$2 status=0
    make_share "$name"
    "$boot" --kind "$kind" --tools --log-dir "$work/$name.logs" --daemon "$3" --daemon-args --posix-acl \
        --share "s=$work/$name" "${@:4}" "$guest_dir/pjdfstest.sh" 2>&1 | sed 's/\x1b\[[0-9;]*m//g' | tee "$work/$name.out" || status=$?
    # A failed test makes the suite's status 1. Any higher status means that it did not finish.
    ((status <= 1)) || fail "the guest '$name' ended with status $status"
    pjdfstest_results "$name"
}
# pjdfstest_results NAME: writes $work/NAME.results from the suite's output, $work/NAME.out.
pjdfstest_results() {
    sed -nE 's/^([a-z0-9_:]+) +(ok|FAILED|skipped|expected_failure)$/\1 \2/p' "$work/$1.out" |
        sed "/^$pjdfstest_racy /d" | sort >"$work/$1.results"
}

count() { grep -c " $2\$" "$work/$1.results" || true; }

pjdfstest_check() {
    local failed passed
    failed=$(count "$1" FAILED) passed=$(count "$1" ok)
    note "pjdfstest $1: $passed passed, $failed failed, $(count "$1" skipped) skipped"
    ((failed == 0 && passed >= pjdfstest_passed)) ||
        fail "pjdfstest: $passed passed, $failed failed in $1: $(grep -A 2 -E ' FAILED$' "$work/$1.out" | tr -s ' \n' ' ')"
    logs_are_clean "$work/$1.logs"
}

# pjdfstest_compare OURS THEIRS: prints a table, and fails if a test passes only with virtiofsd.
pjdfstest_compare() {
    local worse
    note "$(printf '%-12s %20s %20s' result "$1" "$2")"
    for result in ok FAILED skipped; do
        note "$(printf '%-12s %20s %20s' "$result" "$(count "$1" "$result")" "$(count "$2" "$result")")"
    done
    join -j 1 "$work/$1.results" "$work/$2.results" | awk '$2 != $3 { printf "note: %s: %s here, %s there\n", $1, $2, $3 }'
    worse=$(join -j 1 -a 2 -e missing -o 0,1.2,2.2 "$work/$1.results" "$work/$2.results" | awk '$3 == "ok" && $2 != "ok"')
    [[ -z $worse ]] || fail "passes only with virtiofsd: $worse"
}

case_pjdfstest_uml() {
    pjdfstest_run thruway-uml uml "$THRUWAY_DAEMON"
    pjdfstest_run virtiofsd-uml uml "$(peer)"
    pjdfstest_check thruway-uml
    pjdfstest_compare thruway-uml virtiofsd-uml
}

case_pjdfstest_qemu() {
    pjdfstest_run thruway-qemu qemu "$THRUWAY_DAEMON"
    pjdfstest_check thruway-qemu
    if [[ $SOAK ]]; then
        pjdfstest_run virtiofsd-qemu qemu "$(peer)"
        pjdfstest_compare thruway-qemu virtiofsd-qemu
    fi
}

case_pjdfstest_no_file_handles() {
    pjdfstest_run no-file-handles uml "$THRUWAY_DAEMON --inode-file-handles=never"
    pjdfstest_check no-file-handles
}

# The guest opens files by itself.
case_pjdfstest_no_open() {
    pjdfstest_run no-open uml "$THRUWAY_DAEMON --cache=always"
    pjdfstest_check no-open
}

# fsx_case KIND OPERATIONS SEED...: runs fsx in each cache mode.
fsx_case() {
    local kind=$1 cache arguments=()
    shift
    for cache in auto always never metadata writeback never-mmap; do
        make_fast_share "$cache"
        case $cache in
            writeback) start_daemon "$cache" "$work/$cache" --cache=auto --writeback ;;
            never-mmap) start_daemon "$cache" "$work/$cache" --cache=never --allow-mmap ;;
            *) start_daemon "$cache" "$work/$cache" --cache="$cache" ;;
        esac
        arguments+=(--fs "$cache=$work/sockets/$cache")
    done
    # 2 h: 18 runs of 100,000 operations, each of some minutes on a busy machine.
    guest fsx --kind "$kind" --tools --timeout 7200 "${arguments[@]}" "$guest_dir/fsx.sh" "$@"
    logs_are_clean "$work/daemons.logs"
    note "fsx: $1 operations with $(($# - 1)) seeds in each of 6 cache modes"
}

case_fsx_uml() { if [[ $SOAK ]]; then fsx_case uml 100000 1 2 3; else fsx_case uml 3000 1; fi; }
case_fsx_qemu() { if [[ $SOAK ]]; then fsx_case qemu 10000 4; else fsx_case qemu 300 4; fi; }

# 8 MiB for each job splits requests in every possible way. The soak's 128 MiB is more than the guest has in flight.
fio_case() {
    local kind=$1
    shift
    make_fast_share share
    # 1 h: 36 jobs of at most a minute.
    guest fio --kind "$kind" --timeout 3600 --share "s=$work/share" --daemon-args --allow-direct-io "$guest_dir/fio.sh" "$@"
}

case_fio_uml() { fio_case uml "$(pick 8 128)" 'psync libaio io_uring' '4k 64k 1M'; }
# Under emulation each job takes seconds to start.
case_fio_qemu() { fio_case qemu "$(pick 2 32)" 'psync libaio io_uring' "$(pick '4k 1M' '4k 64k 1M')"; }

# These run for a minute each in a soak, the others for some seconds.
main_stressors='dir dentry link symlink rename fallocate flock xattr utime getdent iomix'
more_stressors='access chattr chmod chown copy-file dirdeep dirmany dup fcntl file-ioctl filename filerace fpunch fsize
    fstat handle hdd io locka lockf lockofd lockmix metamix mknod mmapfiles open pseek readahead revio rlimit seek sendfile
    splice sync-file touch unlink verity'

# stress_case KIND SECONDS STRESSOR...: runs these stressors.
stress_case() {
    local kind=$1
    shift
    make_share share
    # 1 h: a dozen stressors of a minute, or 40 of some seconds; removing what a stressor left may take 150 s.
    guest stress --kind "$kind" --timeout 3600 --mem 768 --share "s=$work/share" \
        --daemon-args '--posix-acl --allow-direct-io' "$guest_dir/stress.sh" "$@"
}

# shellcheck disable=SC2086  # lists
case_stress_uml() { stress_case uml "$(pick 2 60)" $main_stressors; }
# shellcheck disable=SC2086
case_stress_more() { stress_case uml "$(pick 1 5)" $more_stressors; }
# shellcheck disable=SC2046
case_stress_qemu() { stress_case qemu "$(pick 1 60)" $(pick 'dentry rename flock xattr iomix' "$main_stressors"); }

# Locks that reach the host. Not lockf and lockmix: there, a process that holds a lock kills one that waits for it, and waits for
# its end. That never comes, since the stock driver does not interrupt a request.
case_stress_locks() {
    make_share share
    # 768 MiB, as above: stress-ng touches all of its shared memory at the start, for which 512 are too little.
    guest stress --kind uml --timeout 600 --mem 768 --share "s=$work/share" --daemon-args '--posix-lock --flock' \
        "$guest_dir/stress.sh" "$(pick 2 60)" flock lockofd locka
}

# shellcheck shell=bash disable=SC2154,SC2034,SC2054  # case-dax.sh has window_case and its settings
# Window passthrough: a QEMU guest with the patches of guest-kernel reads, writes and maps files in place.

# Unless a case says otherwise, files of every size are passed through. 256M holds the slots and the table.
passthrough_options=(--passthrough-window=256M,required --passthrough-min-size=0)

# passthrough: prepares the guest with the patches.
passthrough() {
    # shellcheck disable=SC2086  # one word or none
    "$root/guest-kernel/build" x86_64 ${DEBUG_KERNEL:+debug}
    window_options=("${passthrough_options[@]}")
    window_boot=(--kernel "$root/target/guest-kernel${DEBUG_KERNEL:+-debug}/bzImage")
    # KASAN's shadow takes an eighth of the memory. KUnit's results need this log level. no5lvl: identify_cpu() clears the CPU's
    # features for a moment. An interrupt then would make KASAN report valid five-level addresses.
    [[ ! $DEBUG_KERNEL ]] || window_boot+=(--mem 1024 --kernel-args 'loglevel=7 no5lvl')
}

case_passthrough_files() {
    passthrough
    window_case files passthrough-files.py
}

# With a DAX window, whose part of the region comes first, and extended attributes.
case_passthrough_and_dax() {
    passthrough
    window_options=(--dax-window=128M,required --passthrough-window=128M,required --passthrough-min-size=0 --xattr)
    window_case files passthrough-files.py
}

case_passthrough_messages() {
    passthrough
    window_options=(--passthrough-window=256M,required)
    window_case messages passthrough-messages.py
}

# On ext4 and on tmpfs, in a soak on XFS and Btrfs too. In a soak a seed takes a CPU about 10 minutes.
case_passthrough_fsx() {
    local name
    local -A fsx_volume=([guarded]=$(pick '3000 1' '200000 1 2 3') [fast]=$(pick '3000 1' '200000 4 5'))
    passthrough
    if [[ $SOAK ]]; then
        for name in xfs btrfs; do
            # XFS needs 300 MiB.
            volume "$name" 320 || continue
            window_daemon "$name" "$work/$name"
            fsx_volume[$name]='200000 6 7'
        done
    fi
    make_share guarded
    make_fast_share fast
    window_daemon guarded "$work/guarded"
    window_daemon fast "$work/fast"
    fsx_on_shares "${window_boot[@]}"
    was_passed guarded
    was_passed fast
    [[ ! ${fsx_volume[xfs]-} ]] || was_passed xfs
}

# was_passed NAME: checks that the daemon passed a file through.
was_passed() {
    grep -q 'passthrough.*mapped=Ok' "$work/daemons.logs/daemon-$1.log" || fail "no file of $1 was passed through"
}

case_passthrough_fio() {
    passthrough
    make_share share
    window_daemon s "$work/share"
    start_window_guest fio --fs "s=$work/sockets/s" "${window_boot[@]}" \
        "$guest_dir/fio.sh" "$(pick 8 64)" 'psync mmap libaio io_uring' "$(pick 64k '4k 64k 1M')"
    finish_window_guest fio
    was_passed s
    logs_are_clean "$work/daemons.logs"
}

case_passthrough_pjdfstest() {
    passthrough
    pjdfstest_run passthrough qemu "$THRUWAY_DAEMON ${window_options[*]}" --dax "${window_boot[@]}"
    pjdfstest_check passthrough
}

# The stressors of file contents, five minutes in all in a soak. Without fpunch, which fails on a tmpfs too.
case_passthrough_stress() {
    passthrough
    make_fast_share share
    window_daemon s "$work/share"
    start_window_guest stress --mem 1024 --fs "s=$work/sockets/s" "${window_boot[@]}" \
        "$guest_dir/stress.sh" "$(pick 3 20)" hdd iomix mmap mremap msync fallocate seek readahead aio io-uring sendfile \
        copy-file sync-file splice
    finish_window_guest stress
    was_passed s
    logs_are_clean "$work/daemons.logs"
}

case_passthrough_host_changes() {
    passthrough
    # Small, so that files take each other's slots.
    window_options=(--passthrough-window=16M,required --passthrough-min-size=0)
    window_warning='the guest did not let go of a file in time'
    window_case host passthrough-host.py "$(pick 20 500)"
    # Because of the page in a pipe.
    grep -q "$window_warning" "$work/daemons.logs/daemon-s.log" || fail "the guest let go of a page that was held"
}

# Nothing makes the guest look at its files. With one mapping for each file and one for the table, no slot grows in place.
case_passthrough_idle() {
    local files
    files=$(pick 8 20)
    passthrough
    window_options+=("--max-mappings=$((files + 1))")
    window_case idle passthrough-idle.py "$files"
}

case_passthrough_two_guests() {
    local role pids=()
    passthrough
    make_share share
    make_share meet
    for role in a b; do
        window_daemon "s@$role" "$work/share"
        meet_daemon "@$role"
        start_window_guest "$role" --no-mount --fs "s=$work/sockets/s@$role" --fs "meet=$work/sockets/meet@$role" "${window_boot[@]}" \
            "$guest_dir/passthrough-duo.py" "$role" "$(pick 200 5000)"
        pids+=("$guest_pid")
    done
    answer_guest a "${pids[0]}"
    for role in a b; do
        guest_pid=${pids[0]} pids=("${pids[@]:1}")
        finish_window_guest "$role"
        was_passed "s@$role"
    done
    logs_are_clean "$work/daemons.logs"
}

# The guest writes to the table and beyond its files, and sends false acknowledgements.
case_passthrough_hostile() {
    passthrough
    window_case hostile passthrough-hostile.py
}

# On ext4, and for stores to mappings on XFS and Btrfs too.
case_passthrough_programs() {
    local name
    passthrough
    for name in xfs btrfs; do
        # XFS needs 300 MiB.
        volume "$name" 320 || continue
        window_daemon "$name" "$work/$name"
        window_boot+=(--fs "$name=$work/sockets/$name")
    done
    window_case programs passthrough-programs.py
    was_passed s
}

# Databases with their data on the share. vm-images/setup.sh has fetched them.
soak_passthrough_databases() {
    passthrough
    "$root/vm-images/setup.sh" programs
    cp -r "$guest_dir" "$work/host"
    cp -r "$(. "$root/vm-images/lib.sh" && programs_dir)/root" "$work/host/programs"
    # 1024 MiB: a database with its cache, beside the guest's own.
    window_boot+=(--mem 1024 --timeout "$(pick 1800 10800)" --ro-dir "$work/host")
    window_case databases passthrough-databases.py "$(pick 100 5000)" "$(pick 5000 100000)"
    was_passed s
}

# QEMU and the daemon are killed. All that the guest has synced is on the host.
case_passthrough_power_cut() {
    local promised pid
    passthrough
    make_share share
    window_daemon s "$work/share"
    start_window_guest cut --fs "s=$work/sockets/s" "${window_boot[@]}" "$guest_dir/passthrough-power-cut.py"
    # 120 s: the boot and the writes, under emulation on a busy machine.
    wait_line "$work/cut.out" '^promised 300 ' 120 "$guest_pid"
    kill -KILL -- "-$(<"$work/cut.pid")"
    for pid in $(family "$daemon_pid"); do kill -KILL "$pid" || true; done
    wait "$guest_pid" || true
    was_passed s
    promised=$(grep -c '^promised' "$work/cut.out")
    sed -n 's/^promised [0-9]* //p' "$work/cut.out" | while read -r at text; do
        [[ $(tail -c +$((at + 1)) "$work/share/file" | head -c "${#text}") == "$text" ]] || fail "data synced at $at is missing: $text"
    done
    note "all $promised synced writes are on the host"
}

# faulty_guest NAME honest|flips: boots a guest on shares of its own, and sets $guest_pid and $daemon_pid.
faulty_guest() {
    make_share "share-$1"
    make_share "meet-$1"
    start_daemon "meet@$1" "$work/meet-$1" --cache=never
    window_daemon "s@$1" "$work/share-$1"
    start_window_guest "$1" --no-mount --cpus 2 --queues 2 --fs "s=$work/sockets/s@$1" --fs "meet=$work/sockets/meet@$1" \
        "${window_boot[@]}" "$guest_dir/passthrough-faults.py" "$2" "$seed"
}

# faults NAME KIND COUNT ARGUMENT...: makes faults for this guest, with the variables of faulty_guest.
faults() {
    # 120 s: the boot and the first round of each process, under emulation on a busy machine.
    wait_line "$work/$1.out" '^ready' 120 "$guest_pid"
    "$root/tests/host/faults.py" "$2" --seed "$seed" --faults "$3" --daemon "$(family "$daemon_pid" | paste -sd,)" \
        --guest "$(<"$work/$1.pid")" --share "$work/share-$1" "${@:4}" || fail "faults $*"
}

# nothing_foreign NAME: looks at the files as the host has them.
nothing_foreign() { "$root/tests/host/faults.py" check --share "$work/share-$1" || fail 'a byte that belongs elsewhere'; }

# faults_end NAME: the guest ends in order, and its kernel has warned of nothing.
faults_end() {
    touch "$work/meet-$1/stop"
    wait "$guest_pid" || fail "the guest '$1' ended with an error: $(tail -n 5 "$work/$1.out")"
    cat "$work/$1.out"
    logs_are_clean "$work/$1.logs"
}

# Faults from outside of the daemon. FAULTS_SEED repeats a run's faults, though not the moments at which they come.
case_passthrough_faults() {
    local round making pid seed=${FAULTS_SEED:-$RANDOM}
    passthrough
    for ((round = 0; round < $(pick 1 20); round++, seed++)); do
        note "FAULTS_SEED=$seed"
        # A table that lies. The windows are smaller than the files together, so that slots go from one to another.
        window_options=(--passthrough-window=8M,required --passthrough-min-size=0)
        faulty_guest "flips-$round" flips
        faults "flips-$round" flips "$(pick 40 400)" &
        making=$! pid=$guest_pid
        # A daemon and a guest that stand still, the host's changes, and the daemon's sudden end.
        window_options=(--passthrough-window=16M,required --passthrough-min-size=0)
        faulty_guest "killed-$round" honest
        faults "killed-$round" stops "$(pick 20 100)" --kill "$work/meet-killed-$round"
        # 60 s: it waits for 3 s.
        wait_line "$work/killed-$round.out" '^survived' 60 "$guest_pid"
        kill -KILL -- "-$(<"$work/killed-$round.pid")"
        wait "$guest_pid" || true
        cat "$work/killed-$round.out"
        logs_are_clean "$work/killed-$round.logs"
        nothing_foreign "killed-$round"
        was_passed "s@killed-$round"
        wait "$making" || fail 'the faults of the other guest'
        guest_pid=$pid
        faults_end "flips-$round"
        was_passed "s@flips-$round"
        if [[ $SOAK ]]; then
            faulty_guest "stops-$round" honest
            faults "stops-$round" stops 100
            faults_end "stops-$round"
            nothing_foreign "stops-$round"
        fi
    done
    # A guest that is too late is worth a warning.
    ! grep -HnaE 'panicked|seccomp|SIGSYS' "$work"/daemons.logs/*.log || fail 'errors in the logs'
}

# The functional suite with passed-through files, by the same guest without a window, and by a stock guest with the window
# offered.
case_passthrough_functional() {
    passthrough
    # Without thousands of empty files, each of which would be mapped for a moment.
    window_options[1]=--passthrough-min-size=1
    functional_boot=(--dax "${window_boot[@]}")
    functional qemu "${window_options[@]}"
}

case_passthrough_no_window() {
    passthrough
    functional_boot=("${window_boot[@]}")
    functional qemu
    make_share theirs
    # The part of this suite that virtiofsd passes.
    guest virtiofsd --kind qemu --daemon "$(peer)" --share "s=$work/theirs" "${window_boot[@]}" \
        "$guest_dir/functional.py" /mnt/s create_open_flags large_requests mmap_shared seek_hole_and_data copy_file_range
}

case_passthrough_stock_guest() {
    functional_boot=(--dax)
    functional qemu "${passthrough_options[@]}"
}

# old_guest [--dax]: boots the older stock kernel of Debian trixie.
old_guest() {
    "$root/vm-images/build-old-kernel"
    # At this level the kernel prints its version.
    functional_boot=("$@" --kernel "$(. "$root/vm-images/lib.sh" && old_kernel_dir)/6.12/vmlinuz" --kernel-args loglevel=6)
    functional qemu "${passthrough_options[@]}"
    grep -q 'Linux version 6\.12\.' "$work/functional.logs/console.log" || fail 'the guest did not boot Linux 6.12'
}

# Without a window the daemon is the usual one: in short, only what depends on the guest's kernel.
case_passthrough_old_guest() {
    [[ $SOAK ]] || functional_tests=(create_open_flags large_requests random_writes direct_io append truncate fallocate mmap_shared exec
        tmpfile unlinked_but_open xattrs acls ofd_locks idmapped_mount parallel_processes left_for_the_host)
    old_guest
}
case_passthrough_old_guest_dax() { old_guest --dax; }

# The series fixes: a race that takes a guest with two CPUs. A few hundred rounds are enough where it is lost.
case_fixes_links() {
    passthrough
    make_fast_share share
    guest links --kind qemu --cpus 2 --share "s=$work/share" "${window_boot[@]}" "$guest_dir/links.py" /mnt/s "$(pick 1500 50000)"
}

# In modes whose opens write nothing back.
case_fixes_holes() {
    local mode number=0
    passthrough
    for mode in --cache=always '--cache=always --no-open=never' --writeback; do
        make_fast_share "share$((++number))"
        guest "holes$number" --kind qemu --share "s=$work/share$number" --daemon-args "$mode" "${window_boot[@]}" "$guest_dir/holes.py" /mnt/s
    done
}

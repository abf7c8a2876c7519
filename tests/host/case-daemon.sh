# shellcheck shell=bash disable=SC2154  # lib.sh sets them
# The daemon as a process: its queues, its end, its memory and descriptors, its times.

# switches PID: prints how often each of its threads went to sleep by itself.
switches() {
    local pid task
    for pid in $(family "$1"); do
        for task in /proc/"$pid"/task/*; do
            printf '%s %s %s\n' "${task##*/}" "$(<"$task/comm")" \
                "$(sed -n 's/^voluntary_ctxt_switches:\t//p' "$task/status")"
        done
    done
}

# queues_case BOOT-ARGUMENT...: two CPUs, two queues, and a load on each CPU.
queues_case() {
    local pid busy
    make_fast_share share
    start_daemon s "$work/share"
    "$boot" --log-dir "$work/queues.logs" --cpus 2 --fs "s=$work/sockets/s" "$@" \
        "$guest_dir/queues.sh" >"$work/out" 2>&1 &
    pid=$!
    # 300 s: the boot and the load, under emulation on a busy machine.
    wait_line "$work/out" '^(loaded|FAILED)' 300 "$pid"
    cat "$work/out"
    switches "$daemon_pid" | tee "$work/switches"
    touch "$work/share/go"
    wait "$pid" || fail 'the guest failed'
    logs_are_clean "$work/queues.logs"
    # 500: each CPU's load sends thousands of requests; an unused queue has a handful from its setup.
    busy=$(awk '$2 ~ /^thruway-q[0-9]/ && $3 > 500' "$work/switches" | wc -l)
    note "$busy threads of the daemon served requests: $(awk '$2 ~ /^thruway-q[0-9]/ && $3 > 500 { printf "%s%s", sep, $3; sep = ", " }' "$work/switches") waits"
    ((busy >= 2)) || fail 'only one queue was used'
}

case_queues_qemu() { queues_case --kind qemu --queues 2; }
# Builds its kernel first if the cache lacks it, while other cases run.
case_queues_uml() {
    "$root/vm-images/setup.sh" uml-smp
    queues_case --kind uml-smp
}

# killed GUEST-KIND DAEMON-ARGUMENT...: kills a guest that writes a log with fsync. All that it has synced is on the host.
killed() {
    local kind=$1 promised pid
    shift
    make_share share
    start_daemon s "$work/share" "$@"
    : >"$work/out"
    "$boot" --kind "$kind" --fs "s=$work/sockets/s" --pid-file "$work/pid" --ro-dir "$guest_dir" \
        "$guest_dir/fsync-log.py" /mnt/s >"$work/out" 2>&1 &
    pid=$!
    # 120 s: the boot and 300 records, under emulation on a busy machine.
    wait_line "$work/out" '^promised 300$' 120 "$pid"
    kill -KILL -- "-$(<"$work/pid")"
    wait "$pid" || true
    promised=$(sed -n 's/^promised \([0-9]*\)$/\1/p' "$work/out" | tail -n 1)
    seq -f 'record %06.0f of the log' 1 "$promised" | cmp -n "$((promised * 25))" - "$work/share/log" ||
        fail "not all $promised records that the guest synced are on the host"
    note "$kind, killed: all $promised synced records are on the host"
}

killed_and_gone() {
    killed "$@"
    # 60 s: it only has to end.
    wait_gone 60 "$daemon_pid" || fail 'the daemon did not end with its guest'
    wait "$daemon_pid" || fail "the daemon ended with status $?"
    logs_are_clean "$work/daemons.logs"
}

case_killed_uml() { killed_and_gone uml; }
case_killed_qemu() { killed_and_gone qemu; }
case_killed_writeback() { killed_and_gone uml --writeback; }

# Most of these children get the signal before they run sleep(1).
case_ended_children() {
    local number
    for ((number = 0; number < 100; number++)); do
        sleep 1 &
        kill $!
    done
    wait || true
    [[ -d $work ]] || fail 'a child has cleaned up'
}

case_keep_alive() {
    killed uml --keep-alive
    local round
    for round in 1 2; do
        guest "again-$round" --kind uml --fs "s=$work/sockets/s" "$guest_dir/again.sh" "$round"
        [[ -f $work/share/again-$round ]] || fail 'the next guest wrote nothing'
    done
    kill -0 "$daemon_pid" || fail 'the daemon did not stay'
    logs_are_clean "$work/daemons.logs"
    kill "$daemon_pid"
    wait_gone 60 "$daemon_pid" || fail 'the daemon does not end on SIGTERM'
}

# own_memory PID: prints the KiB of a process and its descendants, without the guest memory that they have mapped. What they share
# counts once.
own_memory() {
    local pid
    for pid in $(family "$1"); do
        awk '/^Pss_(Anon|File):/ { sum += $2 } END { print sum }' "/proc/$pid/smaps_rollup"
    done | awk '{ sum += $1 } END { print sum }'
}

# idle_memory PID: the KiB that they and the kernel take for this daemon alone: memory of no file, page tables, and 16 KiB of stack
# for each thread (THREAD_SIZE of x86-64).
idle_memory() {
    local pid
    for pid in $(family "$1"); do
        awk '/^(Pss_Anon|VmPTE|Threads):/ { sum += $2 * ($1 == "Threads:" ? 16 : 1) } END { print sum }' \
            "/proc/$pid/smaps_rollup" "/proc/$pid/status"
    done | awk '{ sum += $1 } END { print sum }'
}

# descriptors PID: how many a process and its descendants have. A supervisor and its worker have one table of them.
descriptors() {
    local pid
    for pid in $(family "$1"); do find "/proc/$pid/fd" -type l -printf '%f %l\n' || true; done 2>/dev/null | sort -u | wc -l
}

# known_inodes DAEMON-ARGUMENT...: a daemon with an idle guest takes 1.5 MiB at most. Then the guest learns 100,000 inodes by
# READDIRPLUS. The daemon must then use less than 48 MiB and no descriptors for them.
known_inodes() {
    local pid idle held memory own
    make_fast_share share
    (cd "$work/share" && mkdir {0..9} && for directory in {0..9}; do
        seq 10000 | sed "s/^/$directory\//" | xargs touch
    done)
    start_daemon s "$work/share" "$@"
    "$boot" --kind uml --mem 768 --log-dir "$work/known.logs" --ro-dir "$guest_dir" --fs "s=$work/sockets/s" \
        "$guest_dir/known-inodes.sh" >"$work/out" 2>&1 &
    pid=$!
    wait_line "$work/out" '^mounted$' 60 "$pid"
    # After a second the mount's last requests are over.
    sleep 1
    memory=$(own_memory "$daemon_pid") idle=$(descriptors "$daemon_pid")
    own=$(idle_memory "$daemon_pid")
    note "idle: $own KiB with the kernel's part and without files, $memory KiB with the program's; $idle descriptors"
    ((own <= 1536)) || fail 'the idle daemon takes more than 1.5 MiB'
    touch "$work/share/go"
    # 200 s: twenty times what a quiet machine needs.
    wait_line "$work/out" '^listed ' 200 "$pid"
    memory=$(own_memory "$daemon_pid") held=$(descriptors "$daemon_pid")
    note "$(sed -n 's/^listed \([0-9]*\) .*/\1/p' "$work/out") known inodes: $memory KiB, $held descriptors"
    grep -E '^(Name|Vm|Rss|Threads)' /proc/"$daemon_pid"/status
    grep -q '^listed 10001[0-9] ' "$work/out" || fail 'the guest did not see all 100,000 inodes'
    ((memory < 48 * 1024)) || fail 'the daemon has 48 MiB or more'
    # 20 more: directories that the guest may still have open, and names that it has looked up.
    ((held <= idle + 20)) || fail "the daemon holds $held descriptors"
    touch "$work/share/end"
    wait "$pid" || fail 'the guest failed'
    logs_are_clean "$work/known.logs" && logs_are_clean "$work/daemons.logs"
}

case_known_inodes() { known_inodes; }
# A guest looks up names that have timed out, and a lookup opens the file. With cache=always none times out.
case_known_inodes_no_handles() { known_inodes --inode-file-handles=never --cache=always; }

# A guest has many more files open than the daemon may have descriptors. It also removes some of them, and lists directories that
# it has open.
case_open_files() {
    local pid files held
    # Far more than the 4096 and what is allowed below.
    files=$(pick 30000 1000000)
    make_fast_share share
    start_daemon s "$work/share" --cache=always --rlimit-nofile=4096
    "$boot" --kind uml --mem "$(pick 1024 6144)" --timeout 1800 --log-dir "$work/open.logs" --ro-dir "$guest_dir" \
        --fs "s=$work/sockets/s" "$guest_dir/open-files.py" /mnt/s "$files" >"$work/out" 2>&1 &
    pid=$!
    # 900 s: ten times what a quiet machine needs for a million files.
    wait_line "$work/out" '^open ' 900 "$pid"
    held=$(descriptors "$daemon_pid")
    wait_line "$work/out" '^read ' 900 "$pid"
    note "$files open files: $held descriptors, $(own_memory "$daemon_pid") KiB; after reading $(descriptors "$daemon_pid") descriptors"
    # A quarter of 4096 may be kept for other requests. Each removed file takes one, and the daemon itself some hundred.
    ((held <= 1024 + files / 1000 + 500)) || fail "the daemon holds $held descriptors"
    touch "$work/share/end"
    wait "$pid" || fail "the guest failed: $(tail -n 5 "$work/out")"
    logs_are_clean "$work/open.logs" && logs_are_clean "$work/daemons.logs"
}

# The time of thruwayd and virtiofsd for a directory of 100,000 entries, listed with attributes, in turn in one guest.
alone_listing() {
    make_fast_share share
    (cd "$work/share" && seq -f 'entry-%06.0f' 100000 | xargs touch)
    start_daemon ours "$work/share"
    # shellcheck disable=SC2034  # start_daemon's
    daemon_command=$(peer)
    start_daemon theirs "$work/share"
    guest listing --kind uml --mem 768 --timeout 1200 --fs "ours=$work/sockets/ours" --fs "theirs=$work/sockets/theirs" \
        "$guest_dir/listing.sh" "$(pick 1 9)"
}

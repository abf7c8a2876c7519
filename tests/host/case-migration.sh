# shellcheck shell=bash disable=SC2154  # lib.sh sets them
# A guest moves from one QEMU and daemon to another while a process in it writes to open files.

# qmp NAME COMMAND [ARGUMENTS]: sends a command to that machine. Its answers are in $work/NAME.answers.
qmp() { printf '{"execute": "%s", "arguments": %s}\n' "$2" "${3:-{\}}" >"$meeting/$1.in"; }

# start_machine NAME BOOT-ARGUMENT...: starts a machine as a job, with its pid in $machine_pid.
start_machine() {
    local name=$1 pipe=$meeting/$1
    shift
    mkfifo "$pipe.in" "$pipe.out"
    "$boot" --kind qemu --log-dir "$work/$name.logs" --ro-dir "$guest_dir" --fs "s=$work/sockets/$name" \
        --qemu-args "-chardev pipe,id=control,path=$pipe -mon chardev=control,mode=control $*" \
        "$guest_dir/migration.py" /mnt/s "$kind" >"$work/$name.out" 2>&1 &
    machine_pid=$!
    cat "$pipe.out" >"$work/$name.answers" &
    qmp "$name" qmp_capabilities
    # This reports a failure of the target to the source.
    qmp "$name" migrate-set-capabilities '{"capabilities": [{"capability": "return-path", "state": true}]}'
}

# move KIND RESULT SOURCE-ARGUMENTS [TARGET-ARGUMENTS]: starts both machines and migrates, until the source reports RESULT.
move() {
    local verdict=$2 deadline
    kind=$1
    # QEMU runs in its own tree, but shares the host's /dev.
    meeting=$(mktemp -d /dev/shm/thruway-test.XXXXXX)
    at_end rm -rf "$meeting"
    make_share share
    # shellcheck disable=SC2086  # lists
    start_daemon source "$work/share" $3
    # shellcheck disable=SC2086
    start_daemon target "$work/share" ${4-$3}
    start_machine source
    source_pid=$machine_pid
    # 120 s: the boot, under emulation on a busy machine.
    wait_line "$work/source.out" '^written 100$' 120
    start_machine target -incoming defer
    target_pid=$machine_pid
    qmp target migrate-incoming "{\"uri\": \"unix:$meeting/stream\"}"
    # 60 s: it only has to start.
    deadline=$((SECONDS + 60))
    until [[ -S $meeting/stream ]]; do
        ((SECONDS < deadline)) || fail 'the target does not listen'
        sleep 0.1
    done
    qmp source migrate "{\"uri\": \"unix:$meeting/stream\"}"
    # 120 s: half a gigabyte of mostly empty memory.
    deadline=$((SECONDS + 120))
    until grep -qE "\"status\": \"(completed|failed)\"" "$work/source.answers"; do
        ((SECONDS < deadline)) || fail "the migration does not end: $(tail -n 1 "$work/source.answers")"
        qmp source query-migrate
        sleep 0.5
    done
    lines=$(stat -c %s "$work/share/log")
    grep -q "\"status\": \"$verdict\"" "$work/source.answers" ||
        fail "the migration did not end $verdict: $(grep -h '"status"' "$work"/*.answers; tail -n 5 "$work"/target.logs/*)"
}

# goes_on PID: the guest there continues to write and ends well when it is told to. Nothing that it wrote is missing.
goes_on() {
    local deadline status=0
    # 60 s: it writes 200 lines a second.
    deadline=$((SECONDS + 60))
    until (($(stat -c %s "$work/share/log") > lines + 3000)); do
        ((SECONDS < deadline)) || fail 'the guest has stopped writing'
        sleep 0.2
    done
    touch "$work/share/stop"
    wait "$1" || status=$?
    ((status == 0)) || { cat "$work"/*.out; fail "the guest's script ended with status $status"; }
    seq -f 'line %06.0f' 1 "$(<"$work/share/last")" | cmp - "$work/share/log" || fail 'the log is not whole'
    note "$((lines / 12)) lines were written before the migration's end and $(($(<"$work/share/last") - lines / 12)) after it"
}

# moves KIND SOURCE-ARGUMENTS [TARGET-ARGUMENTS]: a migration that succeeds; the source can end.
moves() {
    move "$1" completed "${@:2}"
    qmp source quit
    wait "$source_pid" || true
    goes_on "$target_pid"
    grep -h 'session is' "$work"/daemons.logs/*.log
    # One warning is expected: that of the lost file.
    sed -i '/inodes and open files are lost/d' "$work/daemons.logs/daemon-target.log"
    logs_are_clean "$work/daemons.logs"
    logs_are_clean "$work/target.logs"
}

case_migration_paths() { moves named '--migration-confirm-paths --migration-verify-handles'; }
case_migration_handles() { moves removed --migration-mode=file-handles; }
# The guest agent registers with the other daemon. Nothing else ends what the guest knows within the case.
case_migration_agent() {
    with_agent
    moves named '--cache=always --lease-timeout=3600'
}
case_migration_lost() { moves lost '' --migration-on-error=guest-error; }
case_migration_chroot() { moves named --sandbox=chroot; }
case_migration_no_file_handles() { moves named '--inode-file-handles=never --sandbox=none'; }

# Holds the lock that the guest waits for.
hold_lock() {
    until [[ -e $work/share/lock ]]; do sleep 0.1; done
    # shellcheck disable=SC2016  # the inner shell's
    flock "$work/share/lock" sh -c 'touch "$1/locked"; until [ -e "$1/stop" ]; do sleep 0.1; done' sh "$work/share"
}

# A waiting request cannot move. The source refuses, and answers the request when the lock is free.
case_migration_waiting() {
    hold_lock &
    move waiting failed --flock
    goes_on "$source_pid"
    grep -q 'waits for a lock' "$work"/daemons.logs/daemon-source.log || fail 'the source does not say why'
}

# A removed file has no path. The target refuses, and the guest continues at the source.
case_migration_aborted() {
    move removed failed '' ''
    goes_on "$source_pid"
    grep -q 'cannot load the session' "$work"/daemons.logs/daemon-target.log || fail 'the target does not say why'
}

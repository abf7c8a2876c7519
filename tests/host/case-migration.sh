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

# More arguments of boot.
window_guest_options=()

# window_machine NAME ARGUMENT...: starts a daemon with a window, and a QEMU as a job that qmp() controls and whose guest runs a model of two
# files. The pids are in $daemons and $machines.
window_machine() {
    local name=$1 pipe=$meeting/$1
    shift
    start_daemon "s@$name" "$work/share" --control-path "$work/sockets/$name.control" "${window_options[@]}"
    daemons[$name]=$daemon_pid
    mkfifo "$pipe.in" "$pipe.out"
    # 3 hours: each move takes seconds, but the machine may be busy.
    "$boot" --kind qemu --dax --timeout 10800 --preload "$work/qemu-migrates.so" --log-dir "$work/$name.logs" --ro-dir "$guest_dir" \
        --fs "s=$work/sockets/s@$name" "${window_guest_options[@]}" "${window_boot[@]}" \
        --qemu-args "-chardev pipe,id=control,path=$pipe -mon chardev=control,mode=control $*" \
        "$guest_dir/migration-window.py" /mnt/s >"$work/$name.out" 2>&1 &
    machines[$name]=$!
    cat "$pipe.out" >"$work/$name.answers" &
    qmp "$name" qmp_capabilities
    qmp "$name" migrate-set-capabilities '{"capabilities": [{"capability": "return-path", "state": true}]}'
}

# window_step NAME STEP: waits until the guest is there.
window_step() {
    local deadline=$((SECONDS + 300))
    until (($(steps "$1") >= $2)); do
        if ((SECONDS > deadline)) || ! kill -0 "${machines[$1]}" 2>/dev/null; then
            fail "the guest does not go on: $(tail -n 5 "$work/$1.out")"
        fi
        sleep 0.1
    done
}

# steps NAME: how far the guest is.
steps() { awk '$1 == "step" { step = $2 } END { print step + 0 }' "$work/$1.out"; }

# window_begin: starts the first machine, m0. Fails, with a note, if its QEMU cannot be brought to migrate it: "qemu-migrates.c" says how.
window_begin() {
    local deadline name
    meeting=$(mktemp -d /dev/shm/thruway-test.XXXXXX)
    at_end rm -rf "$meeting"
    make_share share
    for name in a b; do head -c 8M /dev/urandom >"$work/share/$name"; done
    cc -O1 -shared -fPIC -o "$work/qemu-migrates.so" "$root/tests/host/qemu-migrates.c"
    window_machine m0
    # 300 s: the boot, under emulation on a busy machine.
    deadline=$((SECONDS + 300))
    until (($(steps m0) >= 20)); do
        if grep -q 'not the QEMU that this is for' "$work/m0.out"; then
            note 'skipped: qemu-migrates.c is for another QEMU'
            return 1
        fi
        if ((SECONDS > deadline)) || ! kill -0 "${machines[m0]}"; then
            fail "the guest does not start: $(tail -n 20 "$work/m0.out")"
        fi
        sleep 0.2
    done
}

# window_move SOURCE TARGET RESULT: migrates, until the source reports RESULT.
window_move() {
    local deadline
    window_machine "$2" -incoming defer
    qmp "$2" migrate-incoming "{\"uri\": \"unix:$meeting/stream-$2\"}"
    # 60 s: it only has to start.
    deadline=$((SECONDS + 60))
    until [[ -S $meeting/stream-$2 ]]; do
        ((SECONDS < deadline)) || fail 'the target does not listen'
        sleep 0.1
    done
    qmp "$1" migrate "{\"uri\": \"unix:$meeting/stream-$2\"}"
    deadline=$((SECONDS + 120))
    until grep -qE '"status": "(completed|failed)"' "$work/$1.answers"; do
        ((SECONDS < deadline)) || fail "the migration does not end: $(tail -n 1 "$work/$1.answers")"
        qmp "$1" query-migrate
        sleep 0.2
    done
    grep -q "\"status\": \"$3\"" "$work/$1.answers" || fail "the migration did not end $3: $(grep -h '"status"' "$work/$1.answers")"
}

# window_end NAME: the guest there ends, and its files are right.
window_end() {
    local name
    touch "$work/share/stop"
    wait "${machines[$1]}" || fail "the guest's script failed: $(tail -n 20 "$work/$1.out")"
    for name in a b; do
        grep -q "^checksum $name $(sha256sum <"$work/share/$name" | cut -d ' ' -f 1)" "$work/$1.out" || fail "the file $name is wrong"
    done
    grep '^step' "$work/$1.out" | tail -n 1
    logs_are_clean "$work/$1.logs"
}

# window_moves ROUNDS: a guest with windows moves from daemon to daemon, and its files are right at the end.
window_moves() {
    local round source=m0 meeting
    local -A daemons machines
    window_begin || return 0
    for ((round = 1; round <= $1; round++)); do
        was_mapped "$source"
        window_move "$source" "m$round" completed
        note "move $round: $(grep -oE '"downtime": [0-9]+' "$work/$source.answers" | tail -n 1) ms, at step $(steps "$source")"
        window_step "m$round" $(($(steps "$source") + 20))
        qmp "$source" quit
        wait "${machines[$source]}" || true
        # 60 s: it only has to end.
        wait_gone 60 "${daemons[$source]}" || fail 'the source does not end'
        source=m$round
    done
    was_mapped "$source"
    window_end "$source"
    logs_are_clean "$work/daemons.logs"
}

# window_stays TARGET-OPTION...: the target refuses, and the guest goes on at the source with its files mapped.
window_stays() {
    local meeting options=("${window_options[@]}")
    local -A daemons machines
    window_begin || return 0
    was_mapped m0
    window_options=("$@")
    window_move m0 m1 failed
    window_options=("${options[@]}")
    window_step m0 $(($(steps m0) + 20))
    was_mapped m0
    window_end m0
    grep -q 'cannot load the session' "$work/daemons.logs/daemon-s@m1.log" || fail 'the target does not say why'
}

# was_mapped NAME: waits until the guest has files in this window, so that the next move is not one without.
was_mapped() {
    local deadline=$((SECONDS + 60))
    until (($(control "$1" metrics | awk '/^thruway_mappings{/ { sum += $NF } END { print sum + 0 }') > 0)); do
        ((SECONDS < deadline)) || fail "nothing is mapped by $1"
        sleep 0.1
    done
}

case_migration_passthrough() {
    passthrough
    window_moves "$(pick 6 50)"
}

# The target lacks an option that the guest was told of.
case_migration_passthrough_aborted() {
    passthrough
    window_options+=(--xattr --posix-acl)
    window_stays "${passthrough_options[@]}"
}

# The target maps all ranges again before the guest runs.
case_migration_dax() {
    window_guest_options=(--mount-opts dax=always)
    window_moves "$(pick 6 50)"
}

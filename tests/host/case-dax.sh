# shellcheck shell=bash disable=SC2154  # lib.sh sets them
# The DAX window: a QEMU guest maps files. It has the shares s, which is $work/share, and meet.

# 64 mappings: enough for every case except those under pressure.
window_options=("--dax-window=128M,required")
window_arguments=() window_boot=() window_warning=''

# window_daemon NAME DIRECTORY ARGUMENT...: starts a daemon with a window. Its log counts the mappings that a session leaves.
window_daemon() {
    start_daemon "$1" "$2" --log-level=debug --control-path "$work/sockets/$1.control" "${window_options[@]}" "${@:3}"
}

meet_daemon() { start_daemon "meet${1-}" "$work/meet" --cache=never; }

# start_window_guest NAME BOOT-ARGUMENT...: boots a guest as a job, with its pid in $guest_pid and its output in $work/NAME.out.
# In a soak it may be silent for an hour: 200,000 operations of fsx on a busy machine.
start_window_guest() {
    local idle=150 limit=600
    [[ ! $SOAK$DEBUG_KERNEL ]] || idle=3600 limit=10800
    "$boot" --kind qemu --dax --idle "$idle" --timeout "$limit" --log-dir "$work/$1.logs" --pid-file "$work/$1.pid" --ro-dir "$guest_dir" "${@:2}" \
        >"$work/$1.out" 2>&1 &
    guest_pid=$!
}

# finish_window_guest NAME: waits for the guest, which must succeed, and checks its logs.
finish_window_guest() {
    local status=0
    wait "$guest_pid" || status=$?
    cat "$work/$1.out"
    ((status == 0)) || fail "the guest '$1' ended with status $status"
    logs_are_clean "$work/$1.logs"
}

# The guest may call these: control NAME PATH prints what a daemon's control socket answers; requests NAME [OPCODE]... prints how many requests a daemon got; live_mappings
# how many files QEMU maps.
control() { curl --silent --show-error --unix-socket "$work/sockets/$1.control" "http://daemon/$2"; }
requests() {
    control "$1" metrics |
        awk -F'[" ]' -v wanted="${*:2}" '/^thruway_requests/ && (!wanted || index(" " wanted " ", " " $2 " ")) { sum += $NF } END { print sum + 0 }'
}
# Proxy files have no device number. QEMU's other shared mappings are known by their names.
proxy_mappings() { grep -E ' [r-][w-]-s [^ ]+ 00:' "/proc/$(<"$work/$1.pid")/maps" | grep -vE 'memfd:|anon_inode:| /dev/' || true; }
live_mappings() { proxy_mappings "$asking" | wc -l; }

# answer_guest NAME PID: runs the commands that the guest sends, in the share's directory, until the guest ends.
answer_guest() {
    local turn=1 asking=$1
    while kill -0 "$2" 2>/dev/null; do
        if [[ -e $work/meet/$turn.ask ]]; then
            # In the background, so that the guest gets an answer although another command hangs.
            answer "$work/meet/$turn" &
            turn=$((turn + 1))
        fi
        sleep 0.02
    done
}

# answer TURN: writes a command's output and its status.
answer() {
    local status=0
    # The commands come from the guest's script. They may use the functions above.
    (cd "$work/share" && eval "$(<"$1.ask")") >"$1.answering" 2>&1 </dev/null || status=$?
    printf '\n%s\n' "$status" >>"$1.answering"
    mv "$1.answering" "$1.answer"
}

# window_case NAME SCRIPT ARGUMENT...: runs a script in one guest. window_boot holds more arguments of boot, window_arguments
# of the daemon, and window_warning is one that it may log.
window_case() {
    local name=$1 served
    make_share meet
    [[ -d $work/share ]] || make_share share
    window_daemon s "$work/share" "${window_arguments[@]}"
    served=$daemon_pid
    meet_daemon
    start_window_guest "$name" --no-mount --fs "s=$work/sockets/s" --fs "meet=$work/sockets/meet" "${window_boot[@]}" \
        "$guest_dir/$2" "${@:3}"
    answer_guest "$name" "$guest_pid"
    finish_window_guest "$name"
    # 60 s: it only has to end.
    wait_gone 60 "$served" || fail 'the daemon did not end with its guest'
    logs_are_clean "$work/daemons.logs" "$window_warning"
}

case_dax_modes() {
    mkdir "$work/readonly"
    window_daemon readonly "$work/readonly" --readonly
    window_arguments=(--dax-min-size=2M) window_boot=(--fs "readonly=$work/sockets/readonly")
    window_case modes dax-modes.py
}

case_dax_contents() { window_case contents dax-contents.py always "$(pick '' whole)"; }

# Files near the minimum size cross it as they grow and shrink.
case_dax_contents_inode() {
    window_arguments=(--dax-min-size=4097)
    window_case contents dax-contents.py inode
}

# A page of this guest may reach past the last one that a file has on the host.
soak_dax_contents_16k() {
    "$root/vm-images/setup.sh" tree arm64
    window_boot=(--kind arm64 --kernel "$(. "$root/vm-images/lib.sh" && arm64_dir)/arm64-16k/vmlinuz")
    window_case contents dax-contents.py always
}

# fsx_on_shares BOOT-ARGUMENT...: a guest for each of the shares that fsx_volume names.
fsx_on_shares() {
    local name names=("${!fsx_volume[@]}") pids=()
    for name in "${names[@]}"; do
        # shellcheck disable=SC2086  # a list
        start_window_guest "$name" "$@" --tools --fs "$name=$work/sockets/$name" "$guest_dir/fsx.sh" ${fsx_volume[$name]}
        pids+=("$guest_pid")
    done
    for name in "${names[@]}"; do
        guest_pid=${pids[0]} pids=("${pids[@]:1}")
        finish_window_guest "$name"
    done
    logs_are_clean "$work/daemons.logs"
}

# On ext4 the guard handles truncations of the host and of the daemon. On tmpfs there is no guard.
case_dax_fsx() {
    local volume
    volume=$(pick '3000 1' '100000 1 2 3')
    local -A fsx_volume=([guarded]=$volume [fast]=$volume)
    make_share guarded
    make_fast_share fast
    window_daemon guarded "$work/guarded"
    window_daemon fast "$work/fast"
    fsx_on_shares --mount-opts dax=always
}

case_dax_fio() {
    # The whole file fits: otherwise each random access would take a mapping.
    window_options=("--dax-window=512M,required")
    make_share share
    window_daemon s "$work/share"
    start_window_guest fio --mount-opts dax=always --fs "s=$work/sockets/s" \
        "$guest_dir/fio.sh" "$(pick 8 256)" 'mmap psync' "$(pick 64k '4k 64k 1M')"
    finish_window_guest fio
    logs_are_clean "$work/daemons.logs"
}

case_dax_pjdfstest() {
    pjdfstest_run dax qemu "$THRUWAY_DAEMON ${window_options[*]}" --dax --mount-opts dax=always
    pjdfstest_check dax
}

# A working set of four times the window, with as many mappings as are allowed.
case_dax_pressure() {
    local said status=0
    said=$("$THRUWAY_DAEMON" --socket-path "$work/none" --shared-dir "$work" --dax-window=256M --max-mappings=64 2>&1) || status=$?
    [[ $status != 0 && $said == *--max-mappings* && $said != *$'\n'* ]] ||
        fail "a window with too few mappings: status $status: $said"
    window_options=("--dax-window=128M,required" --max-mappings=64) window_boot=(--timeout "$(pick 1200 10800)")
    window_case pressure dax-pressure.py always 256 "$(pick 1000 5000)" "$(pick 5 60)"
}

# The largest window with default options. In emulation QEMU needs 20 ms for a mapping in a full window: the rest is for a soak.
case_dax_large_window() {
    window_options=("--dax-window=512M,required") window_boot=(--timeout "$(pick 1800 10800)")
    # shellcheck disable=SC2046  # a list
    window_case large dax-pressure.py always $(pick '272 0 0 working_set mounted_again' '1024 5000 60')
}

# volume KIND MIB: mounts a new file system of this kind on $work/KIND. Fails if the host's kernel has none.
volume() {
    local mkfs="mkfs.$1 -q"
    [[ $1 != ext4 ]] || mkfs+=' -m 0'
    make_share "$1"
    truncate -s "$2M" "$work/$1.image"
    $mkfs "$work/$1.image" >/dev/null 2>&1
    mount -o loop "$work/$1.image" "$work/$1" 2>/dev/null || { note "the host's kernel has no $1" && return 1; }
}

# Full disks of the host, with file systems that write in place and one that does not.
case_dax_full_disk() {
    local name
    window_boot=()
    for name in ext4 xfs btrfs; do
        # XFS needs 300 MiB.
        volume "$name" 320 || continue
        window_daemon "$name" "$work/$name"
        window_boot+=(--fs "$name=$work/sockets/$name")
        set -- "$@" "$name"
    done
    window_case full dax-full.py "$@"
}

# Two guests on one directory, each with its own daemon.
case_dax_two_guests() {
    local role pids=()
    make_share share
    make_share meet
    # The size of the guests' mapping.
    truncate -s 4M "$work/share/file"
    for role in a b; do
        window_daemon "s@$role" "$work/share"
        meet_daemon "@$role"
        start_window_guest "$role" --no-mount --fs "s=$work/sockets/s@$role" --fs "meet=$work/sockets/meet@$role" \
            "$guest_dir/dax-duo.py" "$role" "$(pick 1000 100000)" "$(pick 20 500)"
        pids+=("$guest_pid")
    done
    answer_guest a "${pids[0]}"
    guest_pid=${pids[0]}
    finish_window_guest a
    guest_pid=${pids[1]}
    finish_window_guest b
    logs_are_clean "$work/daemons.logs"
}

case_dax_host_changes() { window_case host dax-host.py always "$(pick 10 500)"; }
case_dax_programs() { window_case programs dax-programs.py always; }
case_dax_programs_inode() {
    window_arguments=(--dax-min-size=1)
    window_case programs dax-programs.py inode
}

# memory_of PID: prints two sizes of a QEMU in MiB: the guest's memory, and the files that it has mapped.
memory_of() { awk '/^RssShmem:/ { shmem = $2 } /^RssFile:/ { file = $2 } END { print int(shmem / 1024), int(file / 1024) }' "/proc/$1/status"; }
# Prints the host's page cache and the guests' memory.
cached() { awk '/^(Cached|Shmem|MemAvailable):/ { printf "%s %d MiB  ", $1, $2 / 1024 }' /proc/meminfo; }

# read_by_two MODE MIB: sets $grown to the growth of both guests' own memory when they read the file.
read_by_two() {
    local mode=$1 size=$2 role pids=() before after
    rm -f "$work"/meet/*
    for role in a b; do
        window_daemon "s@$role" "$work/share"
        meet_daemon "@$role"
        start_window_guest "$mode-$role" --no-mount --mem $((size + 512)) --fs "s=$work/sockets/s@$role" \
            --fs "meet=$work/sockets/meet@$role" "$guest_dir/dax-memory.py" "$mode"
        pids+=("$guest_pid")
    done
    # 120 s: the boot, under emulation on a busy machine. The same for the file.
    for role in a b; do wait_line "$work/$mode-$role.out" '^mounted$' 120 "${pids[0]}"; done
    note "dax=$mode, before: $(cached)"
    before=$(own_of_guests "$mode")
    touch "$work/meet/go"
    for role in a b; do wait_line "$work/$mode-$role.out" '^read$' 120 "${pids[0]}"; done
    note "dax=$mode, after:  $(cached)"
    after=$(own_of_guests "$mode")
    touch "$work/meet/end"
    for role in a b; do
        guest_pid=${pids[0]} pids=("${pids[@]:1}")
        finish_window_guest "$mode-$role"
    done
    rm -rf "$work/sockets"
    grown=$((after - before))
    note "dax=$mode: the guests' own memory grew by $grown MiB for a file of $size MiB"
}

own_of_guests() { for role in a b; do memory_of "$(<"$work/$1-$role.pid")"; done | awk '{ sum += $1 } END { print sum }'; }

# Two guests that read a file share one copy, the host's. Without DAX each guest has its own.
case_dax_memory() {
    local size grown
    size=$(pick 256 1024)
    make_share share
    make_share meet
    head -c "${size}M" /dev/urandom >"$work/share/file"
    read_by_two never "$size"
    # Half the size leaves room for what a guest allocates meanwhile.
    ((grown > size)) || fail "without DAX two guests have less than half a copy each: the measurement is wrong"
    read_by_two always "$size"
    ((grown < size / 2)) || fail "with DAX two guests have copies of their own: $grown MiB"
}

# The guest is reset within one QEMU.
case_dax_reboot() {
    local served
    make_share share
    make_share meet
    truncate -s 32M "$work/share/file"
    window_daemon s "$work/share"
    served=$daemon_pid
    meet_daemon
    start_window_guest reboot --no-mount --qemu-args '-action reboot=reset' --fs "s=$work/sockets/s" \
        --fs "meet=$work/sockets/meet" "$guest_dir/dax-reboot.py"
    finish_window_guest reboot
    [[ $(grep -c '^mapped in boot' "$work/reboot.out") == 3 ]] || fail 'the guest did not boot three times'
    wait_gone 60 "$served" || fail 'the daemon did not end with its guest'
    logs_are_clean "$work/daemons.logs" "$window_warning"
}

# mapped_guest NAME: boots a guest that maps the share's file and prints that it is alive.
mapped_guest() {
    start_window_guest "$1" --no-mount --fs "s=$work/sockets/s" "$guest_dir/dax-alive.py"
    # 120 s: the boot, under emulation on a busy machine.
    wait_line "$work/$1.out" '^alive 5$' 120 "$guest_pid"
}

# window_mount NAME: prints the FUSE connection of the mount whose files this guest's QEMU has mapped, as NUMBER:INODE. A case beside
# this one may get the number once it is free. The inode in fusectl stays this connection's.
window_mount() {
    local device
    device=$(proxy_mappings "$1" | awk '{ print $4 }' | sort -u)
    [[ $device =~ ^00:[0-9a-f]+$ ]] || fail "QEMU must have mapped files of exactly one mount: '$device'"
    device=$((0x${device#00:}))
    mkdir -p "$work/fuse"
    mountpoint -q "$work/fuse" || mount -t fusectl fusectl "$work/fuse"
    printf '%d:%s\n' "$device" "$(stat -c %i "$work/fuse/$device")"
}

# processes_gone PID...: waits for their end.
processes_gone() {
    local pid
    # 60 s: they only have to end.
    for pid in "$@"; do wait_gone 60 "$pid" || fail "still there: $(tr '\0' ' ' <"/proc/$pid/cmdline")"; done
}

# mount_gone NUMBER:INODE: waits until no namespace has this mount.
mount_gone() {
    # 60 s: a busy machine may take long to end QEMU.
    local deadline=$((SECONDS + 60))
    while [[ $(stat -c %i "$work/fuse/${1%:*}" 2>/dev/null) == "${1#*:}" ]]; do
        ((SECONDS < deadline)) || fail "the window's mount still exists"
        sleep 0.1
    done
    umount "$work/fuse"
}

# The guest is killed with files mapped. The daemon serves the next one.
case_dax_killed_guest() {
    local round pids number
    make_share share
    truncate -s 32M "$work/share/file"
    window_daemon s "$work/share" --keep-alive
    for round in 1 2; do
        mapped_guest "round-$round"
        number=$(window_mount "round-$round")
        kill -KILL -- "-$(<"$work/round-$round.pid")"
        wait "$guest_pid" || true
    done
    kill -0 "$daemon_pid" || fail 'the daemon did not stay'
    mapfile -t pids < <(family "$daemon_pid")
    kill "$daemon_pid"
    processes_gone "${pids[@]}"
    mount_gone "$number"
    logs_are_clean "$work/daemons.logs"
}

# The daemon is killed, and all its processes end. The guest continues.
case_dax_killed_daemon() {
    local pids alive number
    make_share share
    truncate -s 32M "$work/share/file"
    window_daemon s "$work/share"
    mapped_guest killed
    mapfile -t pids < <(family "$daemon_pid")
    note "${#pids[@]} processes"
    number=$(window_mount killed)
    kill -KILL "$daemon_pid"
    processes_gone "${pids[@]}"
    alive=$(grep -c '^alive' "$work/killed.out")
    # 60 s: it prints up to ten lines a second.
    wait_line "$work/killed.out" "^alive $((alive + 5))$" 60 "$guest_pid"
    kill -KILL -- "-$(<"$work/killed.pid")"
    wait "$guest_pid" || true
    mount_gone "$number"
}

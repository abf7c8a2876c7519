# shellcheck shell=bash
# Functions for the cases. run-case sources this file.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
guest_dir=$root/tests/guest
boot=$root/vm-images/boot
THRUWAY_DAEMON=${THRUWAY_DAEMON:-$root/target/release/thruwayd}
SOAK=${SOAK:-} DEBUG_KERNEL=${DEBUG_KERNEL:-}
export THRUWAY_DAEMON

# On a disk, since /tmp may be a tmpfs without enough room. All users may enter it, for daemons of an ordinary user.
work=$(mktemp -d "/var/tmp/thruway-test.XXXXXX")
chmod 755 "$work"

# at_end COMMAND...: what clean_up runs first, for a case that has more to clean up.
at_end() { case_end=("$@"); }
at_end true

# shellcheck disable=SC2317  # called by the trap
clean_up() {
    local pid
    # A child that gets a signal before it runs its program comes here, too: bash(1) runs the traps in it.
    [[ $BASHPID == "$$" ]] || return 0
    trap - EXIT
    "${case_end[@]}"
    # TERM lets boot end its guest. 5 s: it needs one.
    for pid in $(jobs -p); do kill -TERM -- "-$pid" 2>/dev/null || kill -TERM "$pid" 2>/dev/null || true; done
    for pid in $(jobs -p); do wait_gone 5 "$pid" || kill -KILL -- "-$pid" 2>/dev/null || true; done
    awk -v prefix="$work/" 'index($2, prefix) == 1 { print $2 }' /proc/self/mounts | tac | xargs -r -n 1 umount -l
    rm -rf "$work"
}
trap clean_up EXIT
trap 'exit 143' TERM INT

# First shows what the daemons logged, without the usual messages.
fail() {
    grep -vE 'imit of open files| of open file| INFO |DEBUG session| TRACE |deprecated' "$work"/daemons.logs/*.log 2>/dev/null || true
    printf 'failed: %s\n' "$*"
    exit 1
}
note() { printf 'note: %s\n' "$*"; }
pick() { if [[ $SOAK ]]; then echo "$2"; else echo "$1"; fi; }
make_share() { mkdir -m 755 "$work/$1"; }

# with_agent [PROGRAM]: the guests of this case find the agent in /host, and their scripts start it.
with_agent() {
    mkdir "$work/guest"
    cp "$guest_dir"/* "${1:-$root/target/release/thruway-guest}" "$work/guest"
    guest_dir=$work/guest
}

# A share in memory, for cases that would otherwise wait for the host's disk at every fsync.
make_fast_share() {
    make_share "$1"
    mount -t tmpfs -o mode=755 tmpfs "$work/$1"
}

# from_tree PROGRAM ARGUMENT...: runs a program of the guest's tree, which the host may lack.
from_tree() {
    local tree
    tree=$(. "$root/vm-images/lib.sh" && tree_dir)/root
    "$tree/lib64/ld-linux-x86-64.so.2" --library-path "$tree/usr/lib/x86_64-linux-gnu" "$tree/usr/bin/$1" "${@:2}"
}

# peer: prints the path of virtiofsd.
peer() (. "$root/vm-images/lib.sh" && printf '%s/bin/virtiofsd\n' "$(tools_dir)")

# logs_are_clean DIRECTORY [WARNING]: fails if a daemon or a guest kernel logged an error there. The WARNING is expected. With a DAX
# window, so are two warnings of Linux 7.2's own DAX code: when it drops mapped inodes, and when copy_file_range(2) writes to a mapped file.
logs_are_clean() {
    local found
    [[ ${window_options[*]-} != *--dax-window* || ! -e $1/console.log ]] ||
        sed -i '/WARNING: .* at \(dax_disassociate_entry\|truncate_folio_batch_exceptionals\)/,/end trace/d' "$1/console.log"
    # Limits that the host sets (open files) are no error of the daemon.
    found=$(grep -HnaE 'panicked|seccomp|SIGSYS|ERROR|\bWARN\b' "$1"/daemon*.log 2>/dev/null |
        grep -vE "imit of open files|limit .* of open file|deprecated${2:+|$2}" || true)
    found+=$(grep -HnaE 'BUG:|WARNING:|Oops|Call Trace|blocked for more|Kernel panic|stack segment|general protection|\bnot ok [0-9]' \
        "$1"/console.log 2>/dev/null || true)
    [[ -z $found ]] || fail "errors in the logs: $found"
}

# guest NAME BOOT-ARGUMENT...: boots a guest and checks its logs, which are in $work/NAME.logs. No test or stressor is silent for
# 150 s; in a soak on a busy machine a seed of fsx takes minutes.
guest() {
    local name=$1 status=0
    shift
    "$boot" --idle "$(pick 150 900)" --log-dir "$work/$name.logs" --ro-dir "$guest_dir" "$@" || status=$?
    ((status == 0)) || fail "the guest '$name' ended with status $status"
    logs_are_clean "$work/$name.logs"
}

# start_daemon NAME DIRECTORY ARGUMENT...: sets $daemon_pid. The socket is $work/sockets/NAME, the tag is NAME up to an @. An empty
# DIRECTORY is for --share.
start_daemon() {
    local name=$1 directory=$2 command deadline
    shift 2
    read -ra command <<<"${daemon_command:-$THRUWAY_DAEMON}"
    mkdir -p "$work/sockets" "$work/daemons.logs"
    chmod 777 "$work/sockets"
    setsid "${command[@]}" --socket-path "$work/sockets/$name" ${directory:+--shared-dir "$directory"} --tag "${name%@*}" "$@" \
        >"$work/daemons.logs/daemon-$name.log" 2>&1 </dev/null &
    daemon_pid=$!
    # 60 s: it needs milliseconds, or seconds on a busy machine.
    deadline=$((SECONDS + 60))
    until [[ -S $work/sockets/$name ]]; do
        if ((SECONDS > deadline)) || ! kill -0 "$daemon_pid" 2>/dev/null; then
            cat "$work/daemons.logs/daemon-$name.log"
            fail "the daemon '$name' does not listen"
        fi
        sleep 0.02
    done
}

# family PID: prints a process and all its descendants. In the namespace sandbox a child of the daemon serves.
family() {
    local child children
    printf '%s\n' "$1"
    read -ra children < <(cat "/proc/$1"/task/*/children | tr '\n' ' ') || true
    for child in "${children[@]}"; do family "$child"; done
}

# wait_gone SECONDS PID: waits for its end, and fails after this time.
wait_gone() {
    local deadline=$((SECONDS + $1))
    while kill -0 "$2" 2>/dev/null; do
        ((SECONDS < deadline)) || return 1
        sleep 0.05
    done
}

# wait_line FILE PATTERN SECONDS [PID]: waits for such a line, while the process that writes it lives.
wait_line() {
    local deadline=$((SECONDS + $3))
    until grep -qE "$2" "$1" 2>/dev/null; do
        ((SECONDS < deadline && $(kill -0 "${4:-$$}" 2>/dev/null; echo $?) == 0)) ||
            fail "'$2' did not appear within $3 s: $(tail -n 5 "$1")"
        sleep 0.1
    done
}

# in_qemu_machine FUNCTION BOOT-ARGUMENT...: runs a function of the cases in a QEMU guest, which may boot guests there by User-Mode Linux.
# Debian's kernel has what few hosts' kernels have: both sides of NFS, and quotas.
in_qemu_machine() {
    local layers cached daemon
    "$root/vm-images/setup.sh" distributed
    cached=$(. "$root/vm-images/lib.sh" && echo "$cache")
    layers=$(. "$root/vm-images/lib.sh" && echo "$(distributed_dir)/root:$(tree_dir)/root")
    mkdir -p "$work/machine/target/release"
    cp -r "$root/tests" "$root/vm-images" "$work/machine/"
    read -ra daemon <<<"$THRUWAY_DAEMON"
    install "${daemon[0]}" "$work/machine/target/release/thruwayd"
    # 3 hours: a machine of two emulated CPUs boots guests, and runs whole suites in them.
    "$boot" --kind qemu --cpus 2 --mem 3072 --timeout 10800 --log-dir "$work/machine.logs" --ro-dir "$work/machine" \
        --share "cache=$cached" --daemon-args '--readonly --cache=always' "${@:2}" \
        "$root/tests/host/machine" "${layers//"$cached"//mnt/cache}" "$1" || exit 1
    logs_are_clean "$work/machine.logs"
}

# shellcheck shell=bash disable=SC2154  # lib.sh sets them, and other cases' files
# The guest agent in stock guests, on an ordinary device.

# inotify_case SCRIPT GUESTS BOOT-ARGUMENT...: with $files changed files, boots guests on one directory, each with its own daemon. Guest a has the host change it.
inotify_case() {
    local script=$1 guests=$2 role pids=()
    shift 2
    with_agent
    make_share share
    make_share meet
    mkdir "$work/share"/{d,e,many,old,new}
    echo content >"$work/share/f"
    : >"$work/share/log"
    for role in $guests; do
        start_daemon "s@$role" "$work/share"
        start_daemon "meet@$role" "$work/meet" --cache=never
        # 600 s: a busy machine is slow.
        "$boot" --log-dir "$work/$role.logs" --ro-dir "$guest_dir" --timeout 600 --no-mount "$@" \
            --fs "s=$work/sockets/s@$role" --fs "meet=$work/sockets/meet@$role" "$guest_dir/$script" "$role" "$files" &
        pids+=($!)
    done
    answer_guest a "${pids[0]}"
    # If a has failed, b waits for it in vain.
    for role in "${pids[@]}"; do wait "$role" || fail "a guest missed events"; done
    for role in $guests; do logs_are_clean "$work/$role.logs"; done
    logs_are_clean "$work/daemons.logs"
}

case_inotify_agent_uml() {
    local files=1000
    inotify_case inotify.py "a b" --kind uml
}

# Programs that people use to watch files.
case_agent_programs() {
    local files=0
    # Node needs more memory than other guests have.
    inotify_case watchers.py a --kind uml --mem 1024
}

# agent_guest NAME BOOT-ARGUMENT...: a guest with the shares s and meet, which has the host change s.
agent_guest() {
    local name=$1 guest
    shift
    "$boot" --log-dir "$work/$name.logs" --ro-dir "$guest_dir" --no-mount --fs "s=$work/sockets/s" --fs "meet=$work/sockets/meet" "$@" &
    guest=$!
    answer_guest a "$guest"
    wait "$guest" || fail "the guest has failed"
    logs_are_clean "$work/$name.logs"
    logs_are_clean "$work/daemons.logs"
}

# agent_case NAME DAEMON-ARGUMENT...: $agent_boot holds more arguments of boot, $rounds is a number of rounds of random changes,
# $agent_program another agent.
agent_case() {
    local name=$1
    shift
    with_agent "${agent_program:-}"
    make_share share
    make_share meet
    start_daemon s "$work/share" --control-path "$work/sockets/s.control" "$@"
    start_daemon meet "$work/meet" --cache=never
    agent_guest "$name" --timeout "$(pick 600 7200)" "${agent_boot[@]}" "$guest_dir/agent.py" "$rounds" "${AGENT_SEED:-$RANDOM}"
}

case_agent_uml() {
    local rounds agent_boot=(--kind uml)
    rounds=$(pick 60 5000)
    agent_case uml --cache=auto
}

case_agent_always() {
    local rounds agent_boot=(--kind uml)
    rounds=$(pick 60 5000)
    agent_case always --cache=always
}

# Debian's own kernels, on QEMU's ordinary device with one queue of 128.
case_agent_qemu() {
    local rounds agent_boot=(--kind qemu --properties queue-size=128)
    rounds=$(pick 30 1000)
    agent_case qemu --cache=auto
}

# old_kernel_agent SERIES
old_kernel_agent() {
    "$root/vm-images/setup.sh" old-kernel
    local rounds agent_boot=(--kind qemu --properties queue-size=128)
    agent_boot+=(--kernel "$(. "$root/vm-images/lib.sh" && old_kernel_dir)/$1/vmlinuz")
    rounds=$(pick 30 1000)
    agent_case old --cache=always
}
case_agent_debian_13() { old_kernel_agent 6.12; }
case_agent_debian_12() { old_kernel_agent 6.1; }

# arm64_agent FLAVOUR: the static agent for arm64, in a guest of that machine.
arm64_agent() {
    local rounds target=aarch64-unknown-linux-musl agent_program agent_boot
    "$root/vm-images/setup.sh" tree arm64
    rustup target add "$target"
    make -C "$root" static-agent STATIC_TARGET="$target"
    agent_program=$root/target/$target/agent/thruway-guest
    rounds=$(pick 60 300)
    agent_boot=(--kind arm64 --kernel "$(. "$root/vm-images/lib.sh" && arm64_dir)/$1/vmlinuz")
    agent_case "$1" --cache=always
}
soak_agent_arm64() { arm64_agent cloud-arm64; }
soak_agent_arm64_16k() { arm64_agent arm64-16k; }

# What becomes of the agent, and of what it must leave alone.
case_agent_life() {
    local n shares=30 tags=()
    with_agent
    make_share share
    make_share meet
    make_share x
    make_share y
    make_share ro
    mkdir -p "$work/ro/around/below"
    mount -t tmpfs tmpfs "$work/ro/around/below"
    echo there >"$work/ro/around/below/file"
    start_daemon y "$work/y"
    start_daemon ro "$work/ro" --readonly
    start_daemon s "$work/share" --control-path "$work/sockets/s.control" --cache=always --lease-timeout=3600
    make_share w
    start_daemon w "$work/w" --control-path "$work/sockets/w.control" --writeback --lease-timeout=3600
    start_daemon x "$work/x"
    # The guest has this one stopped for a moment.
    echo "$daemon_pid" >"$work/x.pid"
    start_daemon meet "$work/meet" --cache=never
    for ((n = 0; n < shares; n++)); do
        make_share "m$n"
        start_daemon "m$n" "$work/m$n"
        tags+=(--fs "m$n=$work/sockets/m$n")
    done
    agent_guest life --kind uml --timeout "$(pick 600 3600)" "${tags[@]}" --fs "x=$work/sockets/x" --fs "y=$work/sockets/y" --fs "w=$work/sockets/w" \
        --fs "ro=$work/sockets/ro" "$guest_dir/agent-life.py" "$(pick 100 1000)" "$shares"
}

# Neither Debian's kernels for virtual machines nor User-Mode Linux can be told to freeze their processes.
case_agent_suspend() {
    "$root/vm-images/setup.sh" guest-kernel
    with_agent
    make_share share
    make_share meet
    start_daemon s "$work/share" --cache=always --lease-timeout=3600
    start_daemon meet "$work/meet" --cache=never
    agent_guest suspend --kind qemu --kernel "$root/target/guest-kernel/bzImage" "$guest_dir/agent-suspend.py"
}

# No timeout ends within the case, so that the guests see what their agents repeat, and nothing else.
case_caching_agent() {
    with_agent
    caching agent --cache=always --lease-timeout=3600
}

case_caching_agent_writeback() {
    with_agent
    caching agent-writeback --cache=auto --writeback --lease-timeout=3600
}

case_functional_agent() {
    with_agent
    functional uml --cache=always
}

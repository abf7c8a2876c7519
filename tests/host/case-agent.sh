# shellcheck shell=bash disable=SC2034,SC2154  # variables of inotify_case and caching, which stand in other files
# The guest agent in stock guests, on an ordinary device.

# What inotify_uml does.
case_inotify_agent_uml() {
    local files=1000
    with_agent
    inotify_case inotify.py "a b" --kind uml
}

# agent_case NAME DAEMON-ARGUMENT...: $agent_boot holds more arguments of boot, $rounds is a number of rounds of random changes.
agent_case() {
    local name=$1 guest
    shift
    with_agent
    make_share share
    make_share meet
    start_daemon s "$work/share" --control-path "$work/sockets/s.control" "$@"
    start_daemon meet "$work/meet" --cache=never
    "$boot" --log-dir "$work/$name.logs" --ro-dir "$guest_dir" --timeout "$(pick 600 7200)" --no-mount "${agent_boot[@]}" \
        --fs "s=$work/sockets/s" --fs "meet=$work/sockets/meet" "$guest_dir/agent.py" "$rounds" "${AGENT_SEED:-$RANDOM}" &
    guest=$!
    answer_guest a "$guest"
    wait "$guest" || fail "the guest has failed"
    logs_are_clean "$work/$name.logs"
    logs_are_clean "$work/daemons.logs"
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

# What becomes of the agent, and of what it must leave alone.
case_agent_life() {
    local n guest shares=30 tags=()
    with_agent
    make_share share
    make_share meet
    make_share x
    make_share ro
    start_daemon ro "$work/ro" --readonly
    start_daemon s "$work/share" --control-path "$work/sockets/s.control" --cache=always --lease-timeout=3600
    start_daemon x "$work/x"
    start_daemon meet "$work/meet" --cache=never
    for ((n = 0; n < shares; n++)); do
        make_share "m$n"
        start_daemon "m$n" "$work/m$n"
        tags+=(--fs "m$n=$work/sockets/m$n")
    done
    "$boot" --kind uml --log-dir "$work/life.logs" --ro-dir "$guest_dir" --timeout "$(pick 600 3600)" --no-mount "${tags[@]}" \
        --fs "s=$work/sockets/s" --fs "x=$work/sockets/x" --fs "ro=$work/sockets/ro" --fs "meet=$work/sockets/meet" \
        "$guest_dir/agent-life.py" "$(pick 100 1000)" "$shares" &
    guest=$!
    answer_guest a "$guest"
    wait "$guest" || fail "the guest has failed"
    logs_are_clean "$work/life.logs"
    logs_are_clean "$work/daemons.logs"
}

# What caching_notified does.
case_caching_agent() {
    with_agent
    caching agent --cache=always --lease-timeout=3600
}

case_caching_agent_writeback() {
    with_agent
    caching agent-writeback --cache=auto --writeback --lease-timeout=3600
}

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
    local name=$1
    shift
    with_agent
    make_share share
    make_share meet
    start_daemon s "$work/share" --control-path "$work/sockets/s.control" "$@"
    start_daemon meet "$work/meet" --cache=never
    "$boot" --log-dir "$work/$name.logs" --ro-dir "$guest_dir" --timeout "$(pick 600 7200)" --no-mount "${agent_boot[@]}" \
        --fs "s=$work/sockets/s" --fs "meet=$work/sockets/meet" "$guest_dir/agent.py" "$rounds" "${AGENT_SEED:-$RANDOM}" &
    answer_guest a $!
    wait $! || fail "the guest has failed"
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

case_agent_old_kernel() {
    "$root/vm-images/setup.sh" old-kernel
    local rounds agent_boot=(--kind qemu --properties queue-size=128)
    agent_boot+=(--kernel "$(. "$root/vm-images/lib.sh" && old_kernel_dir)/vmlinuz")
    rounds=$(pick 30 1000)
    agent_case old --cache=always
}

# What caching_notified does.
case_caching_agent() {
    with_agent
    caching agent --cache=always --lease-timeout=3600
}

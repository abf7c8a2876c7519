# shellcheck shell=bash disable=SC2154,SC2034  # lib.sh sets them, and other cases' files
# What a VMM and a guest do to the device besides using it: stop and cont, unplug and plug, a crash, a reset, kexec(2).

# The guest may call these.

# answers PATTERN: how many answers of QEMU have it.
answers() { grep -c "$1" "$work/answers" || true; }

unplug() {
    local before deadline=$((SECONDS + 60))
    before=$(answers '"DEVICE_DELETED".*"device": "share"')
    qmp guest device_del '{"id": "share"}'
    until (($(answers '"DEVICE_DELETED".*"device": "share"') > before)); do
        ((SECONDS < deadline)) || { echo 'QEMU does not delete the device' && return 1; }
        sleep 0.1
    done
}

# plug: the connection is a new one, as it is with libvirt. virtio-fs daemons that use vhost-user-backend take a device once for each.
plug() {
    qmp guest chardev-remove '{"id": "fs0"}'
    qmp guest chardev-add '{"id": "fs0", "backend": {"type": "socket", "data": {"server": false,
        "addr": {"type": "unix", "data": {"path": "/run/fs-0.sock"}}}}}'
    qmp guest device_add '{"driver": "vhost-user-fs-pci", "id": "share", "bus": "theport", "chardev": "fs0", "tag": "s"}'
}

add_memory() {
    qmp guest object-add '{"qom-type": "memory-backend-memfd", "id": "more", "size": 268435456, "share": true}'
    qmp guest device_add '{"driver": "pc-dimm", "id": "dimm", "memdev": "more"}'
}

# kexec_files DIRECTORY: the guest's kernel and what it starts from.
kexec_files() {
    local tree
    tree=$(. "$root/vm-images/lib.sh" && tree_dir)
    mkdir "$1"
    cp "$tree/vmlinuz" "$tree/initramfs" "$1/"
    cp "$root/vm-images/guest/initramfs" "$1/init"
}

# frontend DAEMON-ARGUMENT...
frontend() {
    local meeting
    monitored -action reboot=reset -m slots=1,maxmem=2G -device pcie-root-port,id=theport
    make_share share
    make_share meet
    start_daemon s "$work/share" --control-path "$work/sockets/s.control" --keep-alive "$@"
    start_daemon meet "$work/meet" --cache=never --keep-alive
    "$boot" --kind qemu --log-dir "$work/guest.logs" --ro-dir "$guest_dir" --no-mount "${window_boot[@]}" --device s=bus=theport,id=share \
        --fs "s=$work/sockets/s" --fs "meet=$work/sockets/meet" "$guest_dir/frontend.py" >"$work/guest.out" 2>&1 &
    guest_pid=$!
    qmp_answers
    answer_guest guest "$guest_pid"
    # The crash is the guest's own.
    sed -i '/sysrq triggered crash/,/Linux version/d' "$work/guest.logs/console.log"
    finish_window_guest guest
    (($(grep -c '^ok boot' "$work/guest.out") == 4)) || fail 'the guest did not boot four times'
    logs_are_clean "$work/daemons.logs"
}

case_frontend() { frontend --supervise=never; }
case_frontend_supervised() { frontend --supervise; }

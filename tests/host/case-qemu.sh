# shellcheck shell=bash disable=SC2154,SC2034,SC2054  # lib.sh sets them, and case-dax.sh has window_case and its settings
# QEMU with the patches of qemu/: vhost-user-fs-pci has the windows. THRUWAY_QEMU=FILE tests another one, and all cases then run on it.

# patched_qemu: the guests of this case run on it. Fails, with a note, if it is not there.
patched_qemu() {
    THRUWAY_QEMU=${THRUWAY_QEMU:-$(. "$root/vm-images/lib.sh" && qemu_dir)/qemu-system-x86_64}
    [[ -x $THRUWAY_QEMU ]] || { note 'skipped: there is no QEMU with the patches of qemu/ (make qemu)' && return 1; }
    export THRUWAY_QEMU
}

case_qemu_dax_modes() { ! patched_qemu || case_dax_modes; }
case_qemu_dax_contents() { ! patched_qemu || case_dax_contents_inode; }
# tests/run builds this case's kernel first.
case_passthrough_patched_qemu() { ! patched_qemu || case_passthrough_files; }

case_qemu_virtiofsd() {
    patched_qemu || return 0
    pjdfstest_run virtiofsd qemu "$(peer)"
    pjdfstest_check virtiofsd
}

# No guest runs: the device is never started.
case_qemu_early() {
    local tree
    patched_qemu || return 0
    tree=$(. "$root/vm-images/lib.sh" && tree_dir)/root
    timeout 200 python3 "$root/tests/host/qemu-early.py" "$tree/lib64/ld-linux-x86-64.so.2" --library-path "$tree/usr/lib/x86_64-linux-gnu" \
        "$THRUWAY_QEMU" -L "$tree/usr/share/qemu" -L "$tree/usr/share/seabios" || fail 'QEMU does not refuse'
}

# monitored: prepares a guest that qmp() controls, in $window_boot.
monitored() {
    # QEMU runs in its own tree, but shares the host's /dev.
    meeting=$(mktemp -d /dev/shm/thruway-test.XXXXXX)
    at_end rm -rf "$meeting"
    mkfifo "$meeting/guest.in" "$meeting/guest.out"
    window_boot=(--qemu-args "-chardev pipe,id=control,path=$meeting/guest -mon chardev=control,mode=control $*")
}

# qmp_answers: collects the answers of the guest's QEMU in $work/answers.
qmp_answers() {
    cat "$meeting/guest.out" >"$work/answers" &
    qmp guest qmp_capabilities
}

# wait_path PATH: waits until the guest has made it.
wait_path() {
    # 600 s: a boot and 8,192 stores of a page, 35 s under emulation on a busy machine.
    local deadline=$((SECONDS + 600))
    until [[ -e $1 ]]; do
        ((SECONDS < deadline)) || fail "the guest never made $1: $(tail -n 2 "$work"/*.out)"
        kill -0 "$guest_pid" || fail "the guest ended before it made $1"
        sleep 0.05
    done
}

# Resets by QEMU while the guest stores to mappings, reads and makes files.
case_qemu_resets() {
    local round rounds meeting
    patched_qemu || return 0
    rounds=$(pick 5 100)
    monitored -action reboot=reset
    make_share share
    make_share meet
    truncate -s 32M "$work/share/file"
    window_daemon s "$work/share"
    meet_daemon
    start_window_guest resets --no-mount "${window_boot[@]}" --timeout "$(pick 1800 10800)" --fs "s=$work/sockets/s" \
        --fs "meet=$work/sockets/meet" "$guest_dir/qemu-resets.py" "$rounds"
    qmp_answers
    for ((round = 1; round <= rounds; round++)); do
        wait_path "$work/meet/stores-$round"
        (($(proxy_mappings resets | wc -l) >= 16)) || fail 'QEMU has not mapped the file'
        qmp guest system_reset
    done
    finish_window_guest resets
    logs_are_clean "$work/daemons.logs"
    note "$rounds resets with 16 mappings and more"
}

# The windows of three devices take 768 mappings, and QEMU has 512 slots.
case_qemu_mappings() {
    local name live devices=()
    patched_qemu || return 0
    window_options=(--dax-window=512M,required --max-mappings=448)
    for name in a b c; do
        make_share "$name"
        truncate -s 512M "$work/$name/file"
        echo text >"$work/$name/small"
        window_daemon "$name" "$work/$name"
        devices+=(--fs "$name=$work/sockets/$name")
    done
    start_window_guest mappings --no-mount --mem 1024 "${devices[@]}" "$guest_dir/qemu-mappings.py" a b c
    # 200 s: the boot, and 20 ms for a mapping once there are many, under emulation on a busy machine.
    wait_line "$work/mappings.out" '^full$' 200 "$guest_pid"
    live=$(proxy_mappings mappings | wc -l)
    ((live > 480 && live < 512)) || fail "QEMU has $live mappings"
    touch "$work/a/counted"
    finish_window_guest mappings
    note "$live mappings, and no more"
}

# An interrupt for each queue; migration is refused; the device is unplugged while files are mapped.
case_qemu_device() {
    local meeting
    patched_qemu || return 0
    monitored -device pcie-root-port,id=theport
    make_share share
    truncate -s 32M "$work/share/file"
    window_daemon s "$work/share"
    start_window_guest device --no-mount "${window_boot[@]}" --cpus 2 --queues 2 --fs "s=$work/sockets/s" \
        --device s=bus=theport,id=share "$guest_dir/qemu-device.py"
    qmp_answers
    wait_line "$work/device.out" '^mapped$' 180 "$guest_pid"
    (($(proxy_mappings device | wc -l) == 16)) || fail 'QEMU has not mapped the file'
    qmp guest migrate '{"uri": "exec:cat >/dev/null"}'
    wait_line "$work/answers" 'Migration disabled: .*shared memory' 60 "$guest_pid"
    qmp guest device_del '{"id": "share"}'
    wait_line "$work/answers" '"DEVICE_DELETED".*"share"' 60 "$guest_pid"
    finish_window_guest device
}

# libvirt's own device has a window: what thruway command prints, with a daemon that libvirt does not start.
case_qemu_libvirt() {
    local callers_pid kind=qemu arguments=() tags=(share) mount_options=dax=inode mount_shares=yes host_disk=/dev/vdb tools_disk='' guest_tree
    local printed
    patched_qemu || return 0
    (cd "$root" && CARGO_TARGET_DIR=$root/target cargo build --quiet --package thruway-tool --bins)
    guest_tree=$(. "$root/vm-images/lib.sh" && tree_dir)
    mkdir -p "$work/tree" "$work/initramfs/boot" "$work/libvirt.logs"
    make_share share
    # The guest decides by its size when it first hears of a file.
    truncate -s 2M "$work/share/file"
    window_daemon share "$work/share"
    libvirt_files qemu-libvirt.py
    printf '#!/bin/sh\nexec %q --library-path %q %q -L %q -L %q "$@"\n' "$guest_tree/root/lib64/ld-linux-x86-64.so.2" \
        "$guest_tree/root/usr/lib/x86_64-linux-gnu" "$(realpath "$THRUWAY_QEMU")" "$guest_tree/root/usr/share/qemu" \
        "$guest_tree/root/usr/share/seabios" >"$work/qemu"
    chmod +x "$work/qemu"
    printed=$("$root/target/debug/thruway" command --share "$work/share" --dax --for libvirt --thruwayd "$THRUWAY_DAEMON" --qemu "$work/qemu" 2>/dev/null |
        sed -n '/<filesystem/,/<\/filesystem>/p')
    [[ $printed == *"<source socket='/run/thruwayd/share/fs.sock'/>"* ]] || fail "thruway command does not see what QEMU has: $printed"
    sed -e '/<filesystem/,/<\/filesystem>/d; /vhost-user JSON/d; /All that libvirt/d' "$root/tests/host/libvirt.xml" |
        awk -v device="${printed//\/run\/thruwayd\/share\/fs.sock//work/sockets/share}" '/<serial/ { print device } { print }' >"$work/libvirt.xml"
    run_libvirt "$(realpath "$THRUWAY_QEMU")"
    [[ $(head -c 6 "$work/share/file") == window ]] || fail 'the host does not see what the guest stored'
}

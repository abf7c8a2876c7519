# shellcheck shell=bash disable=SC2154  # lib.sh sets them
# The command thruway.

thruway=$root/target/debug/thruway

# tool_machine: sets $tree_qemu and $guest_options, a QEMU and a guest with a shell on stdio.
tool_machine() {
    local tree
    tree=$(. "$root/vm-images/lib.sh" && tree_dir)
    mkdir -p "$work/initramfs/boot"
    cp "$root/vm-images/guest/initramfs" "$work/initramfs/init"
    cp "$root/tests/guest/demo-init" "$work/initramfs/boot/init"
    (cd "$work/initramfs" && find . | cpio --quiet -o -H newc) | cat "$tree/initramfs" - >"$work/initramfs.cpio"
    # Without KVM, which may be there and take minutes to boot a guest (vm-images/boot).
    tree_qemu=$work/qemu
    cat >"$tree_qemu" <<END
#!/bin/bash
arguments=()
while ((\$#)); do
    if [[ "\$1 \${2-}" == '-accel kvm' ]]; then shift; else arguments+=("\$1"); fi
    shift
done
exec "$tree/root/lib64/ld-linux-x86-64.so.2" --library-path "$tree/root/usr/lib/x86_64-linux-gnu" \
    "$tree/root/usr/bin/qemu-system-x86_64" -L "$tree/root/usr/share/qemu" -L "$tree/root/usr/share/seabios" "\${arguments[@]}"
END
    chmod +x "$tree_qemu"
    guest_options="-nodefaults -nographic -serial stdio -drive if=virtio,format=raw,readonly=on,file=$tree/root.erofs"
    guest_options+=" -kernel $tree/vmlinux -initrd $work/initramfs.cpio -append 'console=ttyS0 quiet'"
}

case_tool() {
    local form mount line
    # As the unit tests build it.
    (cd "$root" && CARGO_TARGET_DIR=$root/target cargo build --quiet --package thruway-tool --bins)
    tool_machine
    make_share share
    "$thruway" check "$work/share" --qemu "$tree_qemu" --require windows,qemu,mapping | tee "$work/check" ||
        fail "this host has all of it: $(cat "$work/check")"

    # What is printed is run as it is printed.
    for form in '' --dax; do
        # shellcheck disable=SC2086  # no option, or one
        "$thruway" command --share "$work/share" --for qemu $form --thruwayd "$THRUWAY_DAEMON" --qemu "$tree_qemu" --memory 512M \
            >"$work/printed.sh"
        echo "exec bash $work/printed.sh $guest_options" >"$work/started.sh"
        mount=$(sed -n 's/^# In the guest: //p' "$work/printed.sh")
        type_into "$work/started.sh" "$mount" 'grep /mnt /proc/mounts' "echo by-command$form >/mnt/by-command$form"
        [[ $(cat "$work/share/by-command$form") == "by-command$form" ]] || fail "the printed command does not work: $(cat "$work/console")"
        [[ ! $form ]] || grep -q 'virtiofs.*dax=inode' "$work/console" || fail "there is no DAX: $(cat "$work/console")"
    done
    compgen -G '/tmp/thruway.*' >/dev/null && fail 'the printed script leaves its directory behind'

    # Both are started together, and QEMU's status is the command's. Meanwhile others see the daemon.
    echo "exec $thruway run --thruwayd $THRUWAY_DAEMON --shared-dir $work/share -- $tree_qemu -M q35 -m 512M $guest_options" >"$work/run.sh"
    (
        until "$thruway" status --json 2>/dev/null | grep -F "\"$work/share\"" | grep -q '"guest":{'; do sleep 0.1; done
        "$thruway" status >"$work/status"
        "$thruway" top --batch -n 1 >"$work/top"
        touch "$work/share/seen"
    ) &
    type_into "$work/run.sh" 'mount -t virtiofs share /mnt' 'until [ -e /mnt/seen ]; do sleep 0.1; done; echo by-run >/mnt/by-run'
    [[ $(cat "$work/share/by-run") == by-run ]] || fail "thruway run does not work: $(cat "$work/console")"
    grep -qE '^guest +FUSE 7\.[0-9]+, cache auto' "$work/status" || fail "thruway status: $(cat "$work/status")"
    for line in "^ *[0-9]+ +$work/share +[0-9]" '^ +INIT '; do
        grep -qE "$line" "$work/top" || fail "thruway top has no line '$line': $(cat "$work/top")"
    done
}

# shellcheck shell=bash disable=SC2154  # lib.sh sets them
# Programs that start the daemon, by the command lines that they use. docs/callers.md says where these are from.

# Users that callers run the daemon as: libvirt's session daemon and KubeVirt's.
session_user=54321 kubevirt_user=107

# called NAME FEATURES [listening FD] COMMAND...: runs a caller's command line, with a listening socket as descriptor FD if the caller
# passes one. The guest has the features to look for.
called() {
    local name=$1 features=$2 deadline
    shift 2
    mkdir -p "$work/shares/$name/mounted"
    if [[ $1 == listening ]]; then
        set -- python3 "$root/tests/host/listening.py" "$work/sockets/$name" "${@:2}"
    fi
    (cd "${called_in:-/}" && exec setsid "$@") >"$work/daemons.logs/daemon-$name.log" 2>&1 </dev/null &
    daemons[$name]=$!
    # 60 s: it needs milliseconds, or seconds on a busy machine.
    deadline=$((SECONDS + 60))
    until [[ -S $work/sockets/$name ]]; do
        ((SECONDS < deadline)) || fail "the daemon of $name does not listen"
        sleep 0.02
    done
    called_guests+=(--fs "$name=$work/sockets/$name")
    called_features+=("$name${features:+:}$features")
}

# share_of NAME [OWNER]: prints its path.
share_of() {
    local directory=$work/shares/$1
    mkdir -p "$directory/mounted"
    mount -t tmpfs tmpfs "$directory/mounted"
    touch "$directory/mounted/inside"
    printf 'from the host for %s\n' "$1" >"$directory/host"
    [[ ! ${2-} ]] || chown -R "$2:$2" "$directory"
    printf '%s\n' "$directory"
}

# host_changes: makes a directory in each share and removes it, again and again.
host_changes() {
    local share
    while sleep 0.2; do
        for share in "$work"/shares/*; do
            mkdir "$share/host-made" && rmdir "$share/host-made"
        done
    done
}

# Every caller's exact arguments, in one guest whose devices have the properties that the callers set.
case_callers_commands() {
    local -A daemons=()
    local called_guests=() called_features=() command daemon=$work/virtiofsd name share sockets=$work/sockets
    read -ra command <<<"$THRUWAY_DAEMON"
    # Users other than root must be able to read it, and the checkout may be in root's own directory.
    install -m 755 "${command[0]}" "$daemon"
    mkdir -p "$work/shares" "$sockets" "$work/daemons.logs"
    chmod 777 "$sockets"

    # libvirt 11: all that it can ask for, and a session daemon's.
    share=$(share_of libvirt)
    called libvirt xattr:submount listening 21 "$daemon" --fd=21 --shared-dir "$share" --cache always --sandbox namespace --xattr \
        --thread-pool-size=16 --rlimit-nofile=4096 --log-level debug
    share=$(share_of session "$session_user")
    called session root:submount listening 22 setpriv --reuid="$session_user" --regid="$session_user" --clear-groups \
        "$daemon" --fd=22 --shared-dir "$share" --uid-map=":0:$session_user:1:" --gid-map=":0:$session_user:1:"

    # virtme-ng: 1.35 with a writable and 1.42 with a read-only root.
    "$daemon" --version >/dev/null || fail 'virtme-ng and Lima take no daemon whose --version fails'
    "$daemon" --help | grep -q -- --readonly || fail 'virtme-ng does not find --readonly'
    share=$(share_of virtme)
    called virtme whole "$daemon" --syslog --no-announce-submounts --socket-path "$sockets/virtme" --shared-dir "$share" --sandbox none
    share=$(share_of virtme2)
    called virtme2 acl:xattr:whole "$daemon" --syslog --no-announce-submounts --posix-acl --socket-path "$sockets/virtme2" \
        --shared-dir "$share" --sandbox none -o cache=always
    for name in virtme virtme2; do
        # virtme-ng waits 3 s for it, and then uses 9p.
        [[ $(<"$sockets/$name.pid") == "${daemons[$name]}" ]] || fail "virtme-ng does not find the daemon's pid"
    done

    # Kata Containers' runtimes in Go and in Rust. The Rust one starts the virtual machine when it has read this line.
    share=$(share_of kata)
    called kata submount listening 3 "$daemon" --syslog --cache=auto "--shared-dir=$share" --fd=3 --thread-pool-size=1 --announce-submounts
    share=$(share_of katars)
    called katars xattr:submount "$daemon" --socket-path "$sockets/katars" --shared-dir "$share" --cache auto --sandbox none \
        --seccomp none --inode-file-handles never --thread-pool-size=1 --announce-submounts --xattr
    wait_line "$work/daemons.logs/daemon-katars.log" 'Waiting for vhost-user socket connection' 10

    # KubeVirt: a container without any capability.
    share=$(share_of kubevirt "$kubevirt_user")
    called kubevirt root:submount setpriv --reuid="$kubevirt_user" --regid="$kubevirt_user" --clear-groups --no-new-privs \
        --inh-caps=-all --ambient-caps=-all --bounding-set=-all "$daemon" "--socket-path=$sockets/kubevirt" "--shared-dir=$share" \
        --sandbox=none --cache=auto --migration-on-error=guest-error --migration-mode=find-paths \
        "--translate-uid=host:$kubevirt_user:0:1"

    # Incus asks for the features, and gives --posix-acl=auto only to a daemon that has it. With idmaps it forbids the IDs between
    # them, even if there are none.
    "$daemon" --print-capabilities | python3 -c 'import json, sys
assert "posix-acl-negotiation-mode" in json.load(sys.stdin)["features"]' || fail 'Incus does not find the feature'
    share=$(share_of incus)
    called incus acl:xattr:submount listening 3 "$daemon" --fd=3 --cache=never "--shared-dir=$share" --posix-acl=auto
    share=$(share_of incusold)
    called incusold acl:xattr:submount listening 3 "$daemon" --fd=3 --cache=metadata "--shared-dir=$share" --posix-acl
    share=$(share_of incusids 1000000)
    called incusids root:ids listening 3 "$daemon" --fd=3 --cache=always "--shared-dir=$share" \
        --translate-uid=map:0:1000000:65536 --translate-uid=forbid-guest:0:0 \
        --translate-gid=map:0:1000000:65536 --translate-gid=forbid-guest:0:0 \
        --translate-uid=forbid-guest:65536:4294901759 --translate-gid=forbid-guest:65536:4294901759

    share=$(share_of podman)
    called_in=$share RUST_LOG=ERROR called podman submount "$daemon" --sandbox none --socket-path "$sockets/podman" --shared-dir . \
        --seccomp=none

    share=$(share_of proxmox)
    called proxmox acl:xattr:direct:submount listening 13 "$daemon" --fd=13 "--shared-dir=$share" --xattr --posix-acl \
        --announce-submounts --allow-direct-io --cache=auto --inode-file-handles=prefer --syslog

    # Lima and libvirt find the daemon by its file. `make install` puts in the path that it installs to.
    python3 -c 'import json, sys
backend = json.load(sys.stdin)
assert backend["type"] == "fs" and backend["binary"].startswith("/"), backend' <"$root/50-thruway.json" || fail 'Lima finds no daemon'
    share=$(share_of lima)
    called lima submount "$daemon" --socket-path "$sockets/lima" --shared-dir "$share"

    # systemd-vmspawn and mkosi.
    share=$(share_of vmspawn)
    called vmspawn xattr:whole listening 3 "$daemon" --shared-dir "$share" --xattr --fd 3 --no-announce-submounts --log-level=error \
        --modcaps=-mknod
    share=$(share_of mkosi)
    called mkosi xattr:whole listening 4 "$daemon" --shared-dir "$share" --xattr --no-announce-submounts --sandbox=chroot --fd 4

    with_agent
    host_changes &
    # None of them sets num-request-queues.
    guest callers --kind qemu --properties queue-size=1024 "${called_guests[@]}" "$guest_dir/callers.py" "${called_features[@]}"
    for name in "${!daemons[@]}"; do
        (cd "$work/shares/$name" && sha256sum --quiet -c sum) || fail "the host sees other contents in the share of $name"
        # 60 s: it only has to end. Callers count on it.
        wait_gone 60 "${daemons[$name]}" || fail "the daemon of $name did not end with its guest"
        wait "${daemons[$name]}" || fail "the daemon of $name ended with status $?"
    done
    [[ ! -s $work/daemons.logs/daemon-podman.log ]] || fail "Podman's daemon is not quiet: $(<"$work/daemons.logs/daemon-podman.log")"
    [[ $(stat -c %u "$work/shares/incusids/renamed") == 1000000 ]] || fail "Incus' IDs are not translated"
    # There may be no syslog here.
    sed -i '/cannot log to syslog/d' "$work"/daemons.logs/*.log
    logs_are_clean "$work/daemons.logs"
    note "${#daemons[@]} command lines"
}

# in_callers SCRIPT [QEMU]: runs it as root of a Debian system with libvirt, virtme-ng and the daemon, in namespaces of its own. $work is /work
# there, and what guests boot from is in /tree. All its processes end with it.
in_callers() {
    local guest_tree callers daemon
    "$root/vm-images/setup.sh" callers
    guest_tree=$(. "$root/vm-images/lib.sh" && tree_dir)
    callers=$(. "$root/vm-images/lib.sh" && callers_dir)
    read -ra daemon <<<"$THRUWAY_DAEMON"
    # shellcheck disable=SC2016  # the inner shell's
    setsid unshare --mount --net --ipc --pid --fork --kill-child bash -euc '
        tree=$1 callers=$2 work=$3 daemon=$4 json=$5 script=$6 qemu=$7
        mount -t tmpfs tmpfs "$work/tree"
        cd "$work/tree"
        mkdir upper work root
        mount -t overlay -o "lowerdir=$callers/root:$tree/root,upperdir=upper,workdir=work" overlay root
        cd root
        mount -t proc proc proc
        mount --rbind /dev dev
        mount --rbind /sys sys
        mount -t tmpfs tmpfs tmp
        mount -t tmpfs tmpfs run
        mkdir -p work tree usr/libexec usr/share/qemu/vhost-user
        mount --rbind "$work" work
        mount --bind "$tree" tree
        install -m 755 "$daemon" usr/libexec/thruwayd
        [ -z "$qemu" ] || mount --bind "$qemu" usr/bin/qemu-system-x86_64
        cp "$json" usr/share/qemu/vhost-user/
        cp "$tree/vmlinux" "usr/lib/modules/$(ls usr/lib/modules | grep cloud)/vmlinuz"
        exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 chroot . /bin/bash -eu "/work/$script"' \
        in_callers "$guest_tree" "$callers" "$work" "${daemon[0]}" "$root/50-thruway.json" "$1" "${2-}" &
    callers_pid=$!
}

# libvirt finds the daemon by its file, starts it for two shares, and ends with it.
case_callers_libvirt() {
    local callers_pid kind=qemu arguments=(found:submount asked:xattr:submount) tags=(found asked) mount_options='' mount_shares=yes
    local host_disk=/dev/vdb tools_disk='' guest_tree
    guest_tree=$(. "$root/vm-images/lib.sh" && tree_dir)
    mkdir -p "$work/shares" "$work/tree" "$work/initramfs/boot" "$work/libvirt.logs"
    share_of found >/dev/null
    share_of asked >/dev/null
    with_agent
    libvirt_files callers.py
    cp "$root/tests/host/libvirt.xml" "$work/"
    host_changes &
    run_libvirt ""
    (cd "$work/shares/found" && sha256sum --quiet -c sum && cd ../asked && sha256sum --quiet -c sum) ||
        fail 'the host sees other contents'
    sed 's/^/note: libvirt ran /' "$work/commands"
}

# libvirt_files SCRIPT: makes what the domain boots from. The variables of vm-images/boot are set.
libvirt_files() {
    # As vm-images/boot.
    cp "$root/vm-images/guest/init" "$work/initramfs/boot/init"
    cp "$root/vm-images/guest/initramfs" "$work/initramfs/init"
    cp "$guest_dir/$1" "$work/initramfs/boot/script"
    declare -p kind arguments tags mount_options mount_shares host_disk tools_disk >"$work/initramfs/boot/settings"
    (cd "$work/initramfs" && find . | cpio --quiet -o -H newc) | cat "$guest_tree/initramfs" - >"$work/initrd"
    mkfs.erofs "$work/host.erofs" "$guest_dir" >/dev/null
}

# run_libvirt QEMU: runs the domain of $work/libvirt.xml, on this QEMU if one is named.
run_libvirt() {
    cp "$root/tests/host/libvirt-guest" "$work/"
    in_callers libvirt-guest "$1"
    # 200 s: libvirt asks QEMU what it can do, and the boot, under emulation on a busy machine.
    wait_gone 200 "$callers_pid" || { tail -n 20 "$work"/libvirt.logs/* "$work/output"; fail 'libvirt is not done'; }
    wait "$callers_pid" || { tail -n 20 "$work"/libvirt.logs/*; fail 'libvirt failed'; }
    cat "$work/output"
    [[ $(<"$work/status") == 0 ]] || fail "the guest's script ended with status $(<"$work/status")"
    logs_are_clean "$work/libvirt.logs"
}

# virtme-ng finds the daemon, starts it for the root of its guest, and ends with it.
soak_callers_virtme() {
    local callers_pid
    mkdir -p "$work/tree"
    cp "$root/tests/host/virtme-guest" "$work/"
    in_callers virtme-guest
    # 300 s: the boot of a whole system, under emulation on a busy machine.
    wait_gone 300 "$callers_pid" || fail 'virtme-ng is not done'
    wait "$callers_pid" || fail 'virtme-ng failed'
    tr -d '\r' <"$work/output" | tail -n 3 | diff - <(printf '%s\n' 'virtiofs' 'from the guest' 'done') ||
        fail 'the guest saw something else'
    [[ $(<"$work/guests") == 'from the guest' ]] || fail 'the host does not see what the guest wrote'
    sed 's/^/note: virtme-ng ran /' "$work/commands"
}

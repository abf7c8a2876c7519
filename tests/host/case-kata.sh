# shellcheck shell=bash disable=SC2154  # lib.sh sets them
# Kata Containers' storage: container root file systems and volumes are mounted into the share while a guest runs, and unmounted again.

containers=8

# The files of an image: two layers, as a container engine has them.
make_layers() {
    local layer=$work/layers tree number
    tree=$(. "$root/vm-images/lib.sh" && tree_dir)/root
    mkdir -p "$layer"/{base/bin,base/etc,base/proc,base/data,base/config,base/sub,top/etc,top/app}
    cp "$tree/usr/bin/busybox" "$layer/base/bin/"
    ln -s busybox "$layer/base/bin/sh"
    echo base >"$layer/base/etc/removed"
    echo base >"$layer/base/etc/hosts"
    for number in {1..200}; do printf 'file %s\n' "$number" >"$layer/top/app/$number"; done
    # overlayfs' sign that a file of a lower layer is gone.
    mknod "$layer/top/etc/removed" c 0 0
}

# container_up N ROUND: what containerd, the kubelet and Kata do when a container starts. Every fourth has a block device, the others an
# overlay of the image's layers.
container_up() {
    local own=$work/containers/$1 into=$work/mounts/c$1 name
    mkdir -p "$own"/{rootfs,upper,work,config/..1,empty,volume/part}
    mkdir -p "$into"/{rootfs,config,data,sub}
    touch "$into/hosts"
    if (($1 % 4 == 0)); then
        truncate -s 32M "$own/disk"
        mkfs.ext4 -q -d "$work/layers/base" "$own/disk"
        mount -o loop "$own/disk" "$own/rootfs"
        cp -r "$work/layers/top/app" "$own/rootfs/"
        rm "$own/rootfs/etc/removed"
    else
        mount -t overlay -o "lowerdir=$work/layers/top:$work/layers/base,upperdir=$own/upper,workdir=$own/work" overlay "$own/rootfs"
    fi
    # A ConfigMap: its files are links through ..data, which is replaced in one step.
    echo "round $2" >"$own/config/..1/key"
    ln -sfn ..1 "$own/config/..data"
    ln -sfn ..data/key "$own/config/key"
    echo "127.0.0.1 container-$1" >"$own/hosts"
    for name in rootfs config hosts; do mount --bind "$own/$name" "$into/$name"; done
    mount --bind "$own/empty" "$into/data"
    mount --bind "$own/volume/part" "$into/sub"
}

# swap_config N ROUND VERSION: as the kubelet does.
swap_config() {
    local config=$work/containers/$1/config
    mkdir "$config/..$3"
    echo "round $2 version $3" >"$config/..$3/key"
    ln -s "..$3" "$config/..data_tmp"
    mv -T "$config/..data_tmp" "$config/..data"
}

# unmounted DIRECTORY: unmounts what the guest has let go of. Its FORGET messages may still be on the way.
unmounted() {
    # 60 s: they take milliseconds, and more on a busy machine.
    local deadline=$((SECONDS + 60))
    until umount "$1" 2>"$work/umount"; do
        ((SECONDS < deadline)) || { held "$1"; fail "cannot unmount ${1#"$work/"}: $(<"$work/umount")"; }
        sleep 0.02
    done
}

# held DIRECTORY: shows which descriptors of the daemon are there, and their flags.
held() {
    local pid number name
    for pid in $(family "$daemon_pid"); do
        while read -r number name; do
            echo "$pid: $number -> $name, $(paste -sd' ' "/proc/$pid/fdinfo/$number")"
        done < <(find "/proc/$pid/fd" -printf '%f %l\n' | grep -F "${1#"$work/mounts"}")
    done
}

# container_down N HOW: the host unmounts, in the order in which Kata does. HOW is lazy, as Kata's own calls, or now.
container_down() {
    local own=$work/containers/$1 into=$work/mounts/c$1 name
    for name in hosts sub data config rootfs; do
        case $2 in
            lazy) umount -l "$into/$name" ;;
            now) unmounted "$into/$name" ;;
        esac
    done
    rm "$into/hosts"
    rmdir "$into"/{rootfs,config,data,sub} "$into"
    unmounted "$own/rootfs"
}

# told NAME: waits until the guest has said so.
told() {
    # 120 s: many times what a guest needs on a busy machine.
    local deadline=$((SECONDS + 120))
    until [[ -e $work/control/$1 ]]; do
        ((SECONDS < deadline)) || fail "the guest does not say $1: $(tail -n 5 "$work/out")"
        kill -0 "$guest_pid" 2>/dev/null || { cat "$work/out"; fail 'the guest ended'; }
        sleep 0.05
    done
}

# used: the descriptors of the daemon, and of its window process.
used() { descriptors "$daemon_pid"; }

# has_thread NAME: whether the daemon has it.
has_thread() {
    local pid
    for pid in $(family "$daemon_pid"); do
        if grep -qxs "$1" "/proc/$pid/task"/*/comm; then return; fi
    done
    return 1
}

# kata_storage KIND ROUNDS [BOOT-ARGUMENT...]: each round starts all containers, changes their volumes while they work, and stops them. Half
# of them are unmounted as soon as the guest has unmounted them, and the others lazily, while the guest still has them.
kata_storage() {
    local kind=$1 rounds=$2 round number version before guest_pid deadline how
    shift 2
    mkdir -p "$work"/{mounts,kata,control,containers}
    make_layers
    # Kata's mounts reach the share, and not the other way around.
    mount -t tmpfs -o mode=755 tmpfs "$work/mounts"
    mount --make-shared "$work/mounts"
    mount --bind "$work/mounts" "$work/kata"
    mount --make-slave "$work/kata"
    mount -o remount,bind,ro "$work/kata"
    touch "$work/mounts/ready"
    start_daemon control "$work/control" "${kata_options[@]}"
    start_daemon kata "$work/kata" --cache=auto --thread-pool-size=1 --announce-submounts "${kata_options[@]}"
    "$boot" --kind "$kind" --mem 768 --timeout 3600 --log-dir "$work/kata.logs" --ro-dir "$guest_dir" --fs "kata=$work/sockets/kata" \
        --fs "control=$work/sockets/control" "$@" "$guest_dir/kata.sh" "$containers" "$rounds" >"$work/out" 2>&1 &
    guest_pid=$!
    told ready
    # After a second the mount's last requests are over.
    sleep 1
    before=$(used)
    # With its first FORGET, the high priority queue gets a thread, which takes two.
    has_thread thruway-hiprio || before=$((before + 2))
    for ((round = 1; round <= rounds; round++)); do
        for ((number = 1; number <= containers; number++)); do
            container_up "$number" "$round"
            touch "$work/control/start-$round-$number"
        done
        for ((version = 2; version <= 4; version++)); do
            for ((number = 1; number <= containers; number++)); do
                told "works-$round-$number-$((version - 1))"
                swap_config "$number" "$round" "$version"
            done
        done
        for ((number = 1; number <= containers; number++)); do
            told "works-$round-$number-4"
            touch "$work/control/stop-$round-$number"
            told "stopped-$round-$number"
            grep -q "round $round number $number" "$work/containers/$number/empty/log" || fail 'the host does not see an emptyDir'
            grep -q "round $round number $number" "$work/containers/$number/volume/part/log" || fail 'the host does not see a subPath'
            how=now
            # These the guest has not unmounted.
            ((number > containers / 2)) && how=lazy
            container_down "$number" "$how"
            rm -rf "$work/containers/$number"
        done
        touch "$work/control/swept-$round"
        told "quiet-$round"
        # 60 s: kept descriptors are closed within two, and later on a busy machine.
        deadline=$((SECONDS + 60))
        until (($(used) <= before)) && ! losetup -l -n -O BACK-FILE | grep -q "^$work/"; do
            ((SECONDS < deadline)) ||
                { held ''; losetup -l; fail "the daemon holds $(used) descriptors after round $round, $before before"; }
            sleep 0.2
        done
        # The first process sees the host's mounts.
        [[ $(family "$daemon_pid" | tail -n +2 | xargs -I{} cat /proc/{}/mountinfo | grep -c '/c[0-9]') == 0 ]] ||
            fail 'a mount stays with the daemon'
    done
    note "$before descriptors before, $(used) after $rounds rounds of $containers containers"
    touch "$work/control/end"
    wait "$guest_pid" || { cat "$work/out"; fail 'the guest failed'; }
    logs_are_clean "$work/kata.logs"
    logs_are_clean "$work/daemons.logs"
}

kata_options=()
case_kata_storage() { kata_storage uml "$(pick 2 20)"; }
# With the guest agent, which may keep no mount from going, and must not make the guest believe what only a mount on the host changes.
case_kata_agent() {
    with_agent
    kata_storage uml "$(pick 2 20)"
}
# The guest has files mapped by the window.
soak_kata_storage_dax() {
    # shellcheck disable=SC2054  # the option's comma
    kata_options=(--dax-window=256M,required --dax-min-size=4K --num-request-queues=1)
    kata_storage qemu 5 --dax --mount-opts dax=inode
}

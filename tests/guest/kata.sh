#!/bin/bash
# kata.sh CONTAINERS ROUNDS: runs containers whose root file systems and volumes the host mounts into /mnt/kata. /mnt/control has what host
# and guest tell each other.
# shellcheck source=tests/guest/agent.sh
. /host/agent.sh
containers=$1 rounds=$2
kata=/mnt/kata control=/mnt/control
modprobe overlay

die() { echo "FAILED: $*"; exit 1; }
wait_for() { until [[ -e $control/$1 ]]; do sleep 0.05; done; }

# container ROUND NUMBER: an overlay of the container's own on the shared root file system for every other container, and the shared one
# itself for the others.
container() {
    local round=$1 number=$2 own=/tmp/c$2 into=$kata/c$2 merged version wanted stop text
    wait_for "start-$round-$number"
    mkdir -p "$own"
    mount -t tmpfs tmpfs "$own"
    mkdir "$own"/{upper,work,merged}
    merged=$own/merged
    # This mounts it. overlayfs does not.
    [[ -x $into/rootfs/bin/busybox ]] || die 'the root is empty'
    mountpoint -q "$into/rootfs" || die "$into/rootfs is no mount in the guest"
    if ((number % 2)); then
        mount -t overlay -o "lowerdir=$into/rootfs,upperdir=$own/upper,workdir=$own/work" overlay "$merged" || die 'no overlay'
    else
        mount --bind "$into/rootfs" "$merged" || die 'no root'
    fi
    mount --bind "$into/data" "$merged/data"
    mount --bind "$into/config" "$merged/config"
    mount --bind "$into/sub" "$merged/sub"
    mount --bind "$into/hosts" "$merged/etc/hosts"
    # Load until the end.
    # shellcheck disable=SC2016  # the inner shell's variables
    chroot "$merged" /bin/sh -c 'while :; do
        busybox find / -xdev -type f -exec busybox cat {} + >/dev/null
        for n in 1 2 3 4 5 6 7 8; do echo "$n" >/app/new-$n; busybox mv /app/new-$n /app/moved-$n; busybox rm /app/moved-$n; done
        echo more >>/data/load
    done' >/dev/null 2>&1 &
    local load=$!
    [[ ! -e $merged/etc/removed && -e $merged/app/200 ]] || die 'the layers are wrong'
    [[ $(<"$merged/etc/hosts") == "127.0.0.1 container-$number" ]] || die 'a single file is wrong'
    for version in 1 2 3 4; do
        wanted="round $round version $version"
        ((version > 1)) || wanted="round $round"
        # With cache=auto the guest sees a new ..data within a second.
        for ((tries = 0; tries < 600; tries++)); do
            text=$(chroot "$merged" busybox cat /config/key) || die "the ConfigMap's link leads nowhere"
            [[ $text != "$wanted" ]] || break
            sleep 0.1
        done
        [[ $text == "$wanted" ]] || die "the ConfigMap has '$text' and not '$wanted'"
        touch "$control/works-$round-$number-$version"
    done
    chroot "$merged" busybox sh -c "echo round $round number $number >>/data/log; echo round $round number $number >>/sub/log; sync"
    stop=stop-$round-$number
    wait_for "$stop"
    kill "$load"
    wait "$load" 2>/dev/null
    # A process of the loop may still end.
    until umount -R "$merged"; do sleep 0.1; done
    umount "$own"
    # The first half lets go of the shares' mounts. For the others the host will say that they are gone.
    if ((number <= containers / 2)); then
        until umount -R "$into/rootfs"; do sleep 0.1; done
        umount "$into"/{data,config,sub}
        echo 2 >/proc/sys/vm/drop_caches
    fi
    touch "$control/stopped-$round-$number"
}

[[ -e $kata/ready ]] || die 'there is no share'
start_agent || die 'the guest agent does not start'
touch "$control/ready"
for ((round = 1; round <= rounds; round++)); do
    jobs=()
    for ((number = 1; number <= containers; number++)); do
        container "$round" "$number" &
        jobs+=($!)
    done
    for job in "${jobs[@]}"; do wait "$job" || exit 1; done
    wait_for "swept-$round"
    # It looks, and finds nothing: what was mounted there is forgotten.
    for ((number = 1; number <= containers; number++)); do
        for ((tries = 0; tries < 100; tries++)); do
            [[ -e $kata/c$number ]] || break
            sleep 0.1
        done
        [[ ! -e $kata/c$number ]] || die "c$number is still there"
    done
    ! grep " $kata/" /proc/self/mounts || die 'mounts are left'
    echo 2 >/proc/sys/vm/drop_caches
    touch "$control/quiet-$round"
done
wait_for end

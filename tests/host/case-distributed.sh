# shellcheck shell=bash disable=SC2154  # lib.sh sets them
# A share whose files a server has, mostly a GlusterFS volume of two bricks, mounted twice as by two hosts.

# Of the network namespace that servers and clients are in, and the directory that is their root.
far_net='' far_root=''
# A documentation address (RFC 5737): GlusterFS takes no loopback address.
far_address=198.51.100.1

# far COMMAND...: runs a program of the servers' host.
far() { nsenter --target "$far_net" --net chroot "$far_root" "$@" </dev/null; }

# Ends servers and clients, which have left this process's group. They are known by their root.
far_end() {
    local process
    for process in /proc/[0-9]*; do
        [[ $(readlink "$process/root" 2>/dev/null) != "$far_root" ]] || kill -KILL "${process#/proc/}" 2>/dev/null || true
    done
}

# gluster_start OPTION=VALUE...: starts a volume of two bricks, with these options, and mounts it on $far_root/mnt/a and b. Files are
# distributed by their names, and each is on one brick.
gluster_start() {
    local layers option host
    "$root/vm-images/setup.sh" distributed
    layers=$(. "$root/vm-images/lib.sh" && echo "$(distributed_dir)/root:$(tree_dir)/root")
    far_root=$work/far/root
    mkdir -p "$far_root" "$work/far/rw"
    mount -t tmpfs tmpfs "$work/far/rw"
    mkdir "$work"/far/rw/{upper,work}
    mount -t overlay -o "lowerdir=$layers,upperdir=$work/far/rw/upper,workdir=$work/far/rw/work" overlay "$far_root"
    mount --bind /dev "$far_root/dev"
    mount -t proc proc "$far_root/proc"
    mkdir -p "$far_root"/{bricks,mnt/a,mnt/b}
    mount -t tmpfs tmpfs "$far_root/bricks"
    mkdir "$far_root"/bricks/{1,2}
    setsid unshare --net sleep infinity >"$work/far/sleep" 2>&1 </dev/null &
    far_net=$!
    at_end far_end
    # unshare(1) has made the namespace when it has become sleep(1).
    until [[ $(<"/proc/$far_net/comm") == sleep ]]; do sleep 0.01; done
    far busybox ip link set lo up
    far busybox ip addr add "$far_address/32" dev lo
    echo '127.0.0.1 localhost' >"$far_root/etc/hosts"
    far ldconfig
    far glusterd >"$work/far/glusterd" 2>&1
    # It listens some moments later. 60 s: on a busy machine.
    wait_far 60 gluster --mode=script volume create v "$far_address":/bricks/{1,2}/data force
    for option in "$@"; do far gluster --mode=script volume set v "${option%%=*}" "${option#*=}"; done
    far gluster --mode=script volume start v
    for host in a b; do gluster_mount "$host"; done
}

# wait_far SECONDS COMMAND...: runs a program of the servers' host until it succeeds.
wait_far() {
    local deadline=$((SECONDS + $1))
    until far "${@:2}"; do
        ((SECONDS < deadline)) || fail "no success within $1 s: ${*:2}"
        sleep 0.2
    done
}

gluster_mount() {
    local deadline=$((SECONDS + 60))
    far glusterfs --volfile-server="$far_address" --volfile-id=v --log-file="/var/log/$1.log" "/mnt/$1" >"$work/far/mount-$1" 2>&1
    until mountpoint --quiet "$far_root/mnt/$1" && ls "$far_root/mnt/$1" >/dev/null 2>&1; do
        ((SECONDS < deadline)) || fail "the volume is not mounted: $(tail -n 5 "$far_root/var/log/$1.log")"
        sleep 0.1
    done
}

# brick_pid N: prints the process that serves brick N, if there is one.
brick_pid() {
    local process
    for process in /proc/[0-9]*; do
        # It may end meanwhile.
        if [[ $( (tr '\0' ' ' <"$process/cmdline") 2>/dev/null) == *glusterfsd*"--brick-name /bricks/$1/data"* ]]; then
            [[ $(readlink "$process/root") != "$far_root" ]] || echo "${process#/proc/}"
        fi
    done
}

# far_share NAME MOUNT: makes a directory of the volume, and sets $share to it.
far_share() {
    share=$far_root/mnt/$2/$1
    mkdir -m 755 "$share"
}

# 5 s: the guest keeps attributes for 1 s, and the host's mount for another; the rest is for a busy machine.
case_distributed_two_hosts() {
    local share
    gluster_start
    far_share share a
    two_hosts "$far_root/mnt" 5
}

# two_hosts MOUNTS WITHIN [BOOT-ARGUMENT]...: two guests, each on a host of its own, write and read in turn and lock each other out. A
# guest sees the other's change within so many seconds.
two_hosts() {
    local role pids=() failed=''
    make_share meet
    for role in a b; do
        start_daemon "s@$role" "$1/$role/share" --xattr --posix-lock --flock
        start_daemon "meet@$role" "$work/meet" --cache=never
        "$boot" --kind uml --log-dir "$work/$role.logs" --ro-dir "$guest_dir" --timeout 1800 \
            --fs "s=$work/sockets/s@$role" --fs "meet=$work/sockets/meet@$role" "${@:3}" \
            "$guest_dir/duo.py" "$role" "$2" changes locks &
        pids+=($!)
    done
    for role in "${pids[@]}"; do wait "$role" || failed=yes; done
    [[ -z $failed ]] || fail "the guests do not agree"
    logs_are_clean "$work/a.logs" && logs_are_clean "$work/b.logs" && logs_are_clean "$work/daemons.logs"
}

# Servers of FUSE give the inode number of a removed file to the next one, though a descriptor still holds the file.
case_distributed_names() {
    local share name arguments=() shares=()
    gluster_start
    mkdir "$far_root"/bricks/bound "$far_root"/mnt/{bound,image}
    far bindfs /bricks/bound /mnt/bound
    truncate --size 64M "$far_root/bricks/image"
    far mke2fs -q -t ext4 /bricks/image
    far fuse2fs /bricks/image /mnt/image
    for name in a bound image; do
        mountpoint --quiet "$far_root/mnt/$name" || fail "$name is not mounted"
        far_share share "$name"
        start_daemon "$name" "$share"
        arguments+=(--fs "$name=$work/sockets/$name")
        # The same with an option that does not hold there: the server keeps a removed file only while it is open.
        start_daemon "$name-no-open" "$share" --cache=always --no-open=always --log-level=error
        arguments+=(--fs "$name-no-open=$work/sockets/$name-no-open")
        shares+=("/mnt/$name" "/mnt/$name-no-open")
    done
    guest names --kind uml --timeout 1200 "${arguments[@]}" "$guest_dir/own-directories.py" "$(pick 100 2000)" "${shares[@]}"
    logs_are_clean "$work/daemons.logs"
}

# A server hangs, is killed and comes back, while a guest uses the files of both.
case_distributed_server() {
    local share pid name brick stopped server
    gluster_start network.ping-timeout=10
    far_share share a
    # Names that are on brick 1 and on brick 2.
    local -A on
    for name in {1..50}; do
        echo >"$share/file-$name"
        for brick in 1 2; do [[ ! -e $far_root/bricks/$brick/data/share/file-$name ]] || on[$brick]=file-$name; done
    done
    start_daemon s "$share"
    "$boot" --kind uml --log-dir "$work/guest.logs" --ro-dir "$guest_dir" --fs "s=$work/sockets/s" --timeout 300 \
        "$guest_dir/servers.py" "${on[1]}" "${on[2]}" >"$work/out" 2>&1 &
    pid=$!
    file_goes_on "${on[1]}" "$pid"
    file_goes_on "${on[2]}" "$pid"

    # One server hangs: the files of the other are served by the same queue.
    stopped=$(brick_pid 1)
    [[ $stopped ]] || fail 'brick 1 has no process'
    mapfile -d '' server <"/proc/$stopped/cmdline"
    kill -STOP "$stopped"
    file_waits "${on[1]}" "$pid"
    file_goes_on "${on[2]}" "$pid"
    kill -CONT "$stopped"
    file_goes_on "${on[1]}" "$pid"

    # It dies: its files give errors. It comes back: they are there again.
    kill -KILL "$stopped"
    wait_line "$work/out" "^${on[1]} ENOTCONN" 60 "$pid"
    file_goes_on "${on[2]}" "$pid"
    # By its own command, with its own port. "gluster volume start v force" may come too early for glusterd, and clients then look for
    # the old process without end.
    far "${server[@]}"
    file_goes_on "${on[1]}" "$pid"
    note "errors while the server was away: $(grep -oE "^${on[1]} E[A-Z]+" "$work/out" | sort | uniq -c | tr '\n' ' ')"
    touch "$share/end"
    wait "$pid" || fail "the guest failed: $(tail -n 5 "$work/out")"
    logs_are_clean "$work/guest.logs" && logs_are_clean "$work/daemons.logs"
}

file_rounds() { grep -cE "^$1 ok" "$work/out" || true; }

# file_goes_on FILE PID: the guest has used the file some more times. 120 s: a client connects anew every three seconds.
file_goes_on() {
    local before deadline=$((SECONDS + 120))
    before=$(file_rounds "$1")
    until (($(file_rounds "$1") >= before + 5)); do
        kill -0 "$2" || fail "the guest has ended: $(tail -n 5 "$work/out")"
        ((SECONDS < deadline)) || fail "$1 is not served: $(tail -n 5 "$work/out")"
        sleep 0.1
    done
}

# file_waits FILE PID: the guest uses the file no more. Two looks with the same count: it is used many times a second.
file_waits() {
    local before
    until before=$(file_rounds "$1") && sleep 1 && (($(file_rounds "$1") == before)); do kill -0 "$2" || fail 'the guest has ended'; done
}

# there COMMAND...: runs a program where the file system is mounted.
there() { if [[ $far_root ]]; then far "$@"; else "$@"; fi; }

# suites_agree LIMIT LEFT_OUT DAEMON-ARGUMENT...: single system calls and pjdfstest pass in a guest as far as they pass on the mount itself,
# $far_root/mnt/a. A test may take LIMIT seconds. Those LEFT_OUT are not run.
suites_agree() {
    local limit=$1 left_out=$2 names suite where worse boot_arguments=(--kind uml --timeout 5000 --kernel-args "seccomp=on TEST_LIMIT=$1")
    local check=$far_root/tmp/check
    shift 2
    mapfile -t names < <(sed -n 's/^def test_\([a-z0-9_]*\)(.*/\1/p' "$guest_dir/functional.py" | grep -vxF "$left_out")
    mkdir "$far_root"/mnt/{s,a/mount,a/guest} "$check"
    mkdir "$far_root"/mnt/a/{mount,guest}/{f,p}
    chmod 755 "$far_root"/mnt/a/{mount,guest}{,/f,/p}
    cp "$guest_dir"/{check,functional}.py "$guest_dir/pjdfstest.sh" "$check/"
    sed -i 's#"/host"#"/tmp/check"#' "$check/functional.py"
    there env "TEST_LIMIT=$limit" python3 /tmp/check/functional.py /mnt/a/mount/f "${names[@]}" >"$work/functional-mount.out" || true
    mount --bind "$(. "$root/vm-images/lib.sh" && tools_dir)/guest" "$far_root/usr/local"
    mount --bind "$far_root/mnt/a/mount/p" "$far_root/mnt/s"
    there env PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin /tmp/check/pjdfstest.sh >"$work/pjdfstest-mount.out" 2>&1 || true

    start_daemon f "$far_root/mnt/a/guest/f" "$@"
    "$boot" "${boot_arguments[@]}" --log-dir "$work/functional.logs" --ro-dir "$guest_dir" --fs "f=$work/sockets/f" \
        "$guest_dir/functional.py" /mnt/f "${names[@]}" >"$work/functional-guest.out" || true
    start_daemon s "$far_root/mnt/a/guest/p"
    "$boot" "${boot_arguments[@]}" --tools --log-dir "$work/pjdfstest.logs" --fs "s=$work/sockets/s" \
        "$guest_dir/pjdfstest.sh" >"$work/pjdfstest-guest.out" 2>&1 || true
    for where in mount guest; do
        sed -i 's/\x1b\[[0-9;]*m//g' "$work/pjdfstest-$where.out"
        pjdfstest_results "pjdfstest-$where"
        sed -nE 's/^(ok|FAILED|skipped) ([a-z0-9_]+).*/\2 \1/p' "$work/functional-$where.out" | sort >"$work/functional-$where.results"
    done
    for suite in functional pjdfstest; do
        for where in mount guest; do
            note "$suite, $where: $(count "$suite-$where" ok) passed; failed: $(sed -n 's/ FAILED$//p' "$work/$suite-$where.results" | xargs)"
        done
        worse=$(join -a 2 -e missing -o 0,1.2,2.2 "$work/$suite"-{guest,mount}.results | awk '$3 == "ok" && $2 !~ /ok|skipped/ { print $1 }')
        [[ -s $work/$suite-mount.results && -z $worse ]] ||
            fail "passes on the mount only: ${worse//$'\n'/ } $(grep -A 2 FAILED "$work/$suite-guest.out")"
    done
    logs_are_clean "$work/functional.logs" && logs_are_clean "$work/pjdfstest.logs" && logs_are_clean "$work/daemons.logs"
}

# A program that takes both kinds of lock for one file waits for itself on GlusterFS.
soak_distributed_suites() {
    gluster_start
    suites_agree 120 locks --xattr --posix-lock --flock --killpriv-v2
}

# The mount itself has an old size now and then if it reads ahead while a file is allocated, so the share "far" allocates nothing.
soak_distributed_fsx() {
    local share name arguments=()
    gluster_start
    for name in far never; do
        far_share "$name" a
        start_daemon "$name" "$share" "--cache=${name/far/auto}"
        arguments+=(--fs "$name=$work/sockets/$name")
    done
    guest fsx --kind uml --tools --timeout 7200 "${arguments[@]}" "$guest_dir/fsx.sh" 20000 1
    logs_are_clean "$work/daemons.logs"
}

# Two hosts on an NFS server. The machine of in_qemu_machine is all three.

# Exports /srv/export, a tmpfs unless something is mounted there, and mounts it on /mnt/a and /mnt/b as two hosts do. The server knows a client by the name of its host, so each mount
# is made under a name of its own. Both mounts share no cache, since they name the server by different addresses.
nfs_start() {
    local host number=0 clients
    busybox ip link set lo up
    mkdir -p /srv/export /mnt/{a,b} /var/lib/nfs/{rpc_pipefs,nfsdcld}
    mountpoint --quiet /srv/export || mount -t tmpfs tmpfs /srv/export
    mount -t rpc_pipefs rpc_pipefs /var/lib/nfs/rpc_pipefs
    mount -t nfsd nfsd /proc/fs/nfsd
    echo '/srv/export *(rw,no_root_squash,no_subtree_check,fsid=0)' >/etc/exports
    # Clients have so long to claim their locks again when the server has started. 90 s by default.
    echo 10 >/proc/fs/nfsd/nfsv4leasetime
    echo 10 >/proc/fs/nfsd/nfsv4gracetime
    # Its package makes it.
    touch /var/lib/nfs/etab
    nfsdcld
    rpc.mountd --no-nfs-version 3 --no-nfs-version 2
    exportfs -a
    nfs_serve
    # With delegations of directories, the client of Linux 7.2 may never find a new name that it has looked up in vain.
    modprobe nfsv4 directory_delegations=N
    for host in a b; do
        # shellcheck disable=SC2016  # the inner shell's
        unshare --uts bash -euc 'hostname "$1" && mount -t nfs4 -o vers=4.2 "127.0.0.$2:/" "/mnt/$1"' mount "$host" "$((++number))"
    done
    clients=(/proc/fs/nfsd/clients/*)
    ((${#clients[@]} == 2)) || fail "the server sees ${#clients[@]} clients"
}
nfs_serve() { rpc.nfsd --no-nfs-version 3 --no-udp 4; }

soak_distributed_nfs() { in_qemu_machine nfs_two_hosts; }
soak_distributed_nfs_server() { in_qemu_machine nfs_server; }
soak_distributed_nfs_suites() { in_qemu_machine nfs_suites; }
soak_distributed_nfs_removed() { in_qemu_machine nfs_removed; }

# A guest's NFS server exports the share. The machine is the guest.
case_nfs_export() {
    make_share share
    start_daemon exported "$work/share" --nfs-export
    start_daemon plain "$work/share"
    in_qemu_machine nfs_export --fs "exported=$work/sockets/exported" --fs "plain=$work/sockets/plain"
    logs_are_clean "$work/daemons.logs"
}
nfs_export() {
    "$guest_dir/export.py" handles /mnt/exported /mnt/plain
    mkdir -p /srv/export
    mount --bind /mnt/exported /srv/export
    nfs_start
    "$guest_dir/export.py" client /mnt/a /mnt/b
}

# 100 s: the mount keeps a directory's attributes for up to 60 s.
nfs_two_hosts() {
    nfs_start
    mkdir /mnt/a/share
    two_hosts /mnt 100 --kernel-args seccomp=on
}

# The server stops and starts anew, while a guest uses a file of it and another one by one queue.
nfs_server() {
    local pid
    nfs_start
    make_share share
    mkdir "$work/share/far"
    mount --bind /mnt/a "$work/share/far"
    echo >"$work/share/near"
    echo >"$work/share/far/file"
    start_daemon s "$work/share" --flock
    "$boot" --kind uml --log-dir "$work/guest.logs" --ro-dir "$guest_dir" --fs "s=$work/sockets/s" --timeout 1800 \
        --kernel-args seccomp=on "$guest_dir/servers.py" --lock near far/file >"$work/out" 2>&1 &
    pid=$!
    # 600 s: the guest boots.
    wait_line "$work/out" '^far/file ok' 600 "$pid"
    rpc.nfsd 0
    file_waits far/file "$pid"
    file_goes_on near "$pid"
    nfs_serve
    file_goes_on far/file "$pid"
    # The guest has its lock again.
    ! flock --nonblock /mnt/b/file true || fail "another host got the guest's lock"
    touch "$work/share/end"
    wait "$pid" || fail "the guest failed: $(tail -n 5 "$work/out")"
    ! grep -E ' E[A-Z]+$' "$work/out" || fail 'the guest saw errors'
    flock --nonblock /mnt/b/file true || fail 'the lock outlived the guest'
    logs_are_clean "$work/guest.logs" && logs_are_clean "$work/daemons.logs"
}

# The daemon keeps no file open that no program has open. So a removed file is gone at once, and its directory can be removed.
nfs_removed() {
    local pid process open deadline
    nfs_start
    mkdir /mnt/a/share
    make_share meet
    start_daemon meet "$work/meet" --cache=never
    start_daemon s /mnt/a/share
    "$boot" --kind uml --log-dir "$work/guest.logs" --ro-dir "$guest_dir" --fs "s=$work/sockets/s" --fs "meet=$work/sockets/meet" \
        --timeout 1800 --kernel-args seccomp=on "$guest_dir/removed.sh" &
    pid=$!
    until [[ -e $work/meet/made ]]; do kill -0 "$pid" || fail 'the guest has ended'; sleep 0.1; done
    # 120 s: the guest's last closes are on their way.
    deadline=$((SECONDS + 120))
    until open=$(for process in $(family "$daemon_pid"); do readlink "/proc/$process/fd/"*; done | grep -c '/kept$' || true) &&
        ((open == 0)); do
        ((SECONDS < deadline)) || fail "the daemon keeps $open files open"
        sleep 0.1
    done
    touch "$work/meet/go"
    wait "$pid" || fail 'the guest could not remove its directories'
    open=$(ls -A /srv/export/share)
    [[ -z $open ]] || fail "the server has $open"
    logs_are_clean "$work/guest.logs" && logs_are_clean "$work/daemons.logs"
}

# 1200 s: the guest is in an emulated machine.
nfs_suites() {
    nfs_start
    suites_agree 1200 '' --xattr --posix-lock --flock
}

# shellcheck shell=bash disable=SC2154  # lib.sh sets them
# Options that change what a guest sees: one guest with many shares, each with its own daemon.

# These daemons run as an ordinary user: any ids without a name.
user=54321

as_user() { printf 'setpriv --reuid=%s --regid=%s --clear-groups --no-new-privs ' "$user" "$user"; }

option_share() {
    local tag=$1
    shift
    start_daemon "$tag" "$work/shares/$tag" "$@"
    option_guests+=(--fs "$tag=$work/sockets/$tag")
}

# fill_shares: the contents of each share before its daemon starts.
fill_shares() {
    mkdir -p "$work"/shares/{limited,readonly,readonly-mount,xattrmap,overlay,translate,submounts,onefs,readdir,user,user-none,user-mapped,legacy,mapped-ids,idmapped,several/{first,second}}
    cd "$work/shares" || return
    echo 'a secret of the host' >secret
    # Both roots have the same inode number, as those of any two tmpfs or ext4.
    mount -t tmpfs tmpfs submounts
    mkdir readonly/dir readdir/many submounts/mounted onefs/mounted several/second/mounted
    mount -t tmpfs -o size=8M tmpfs several/second/mounted
    echo 'from the host' | tee readonly/file readdir/file several/second/file user/hosts >user-none/hosts
    from_tree setfattr -n user.host -v host readonly/file readdir/file
    touch xattrmap/hosts translate/hosts
    from_tree setfattr -n user.host -v host xattrmap/hosts
    chown 100042:200043 translate/hosts
    chown 100000:200000 translate
    seq 3000 | sed 's/^/readdir\/many\//' | xargs touch
    mount -t tmpfs -o size=8M tmpfs submounts/mounted
    mount --bind submounts/mounted onefs/mounted
    echo 'in the submount' >submounts/mounted/file
    ln -s "$work/shares/secret" submounts/absolute
    ln -s ../secret submounts/relative
    ln -s mounted/../../secret submounts/through-dots
    ln -s .. submounts/outside
    chown -R "$user:$user" user user-none user-mapped
    mkfifo submounts/fifo
    perl -MSocket -e 'socket(S, PF_UNIX, SOCK_STREAM, 0) && bind(S, sockaddr_un("submounts/socket")) or die "$!\n"'
    # The tree's mount(8): that of Debian 12 cannot do it.
    touch mapped-ids/hosts
    from_tree mount --bind -o X-mount.idmap=b:0:100000:65536 "$PWD/mapped-ids" "$PWD/idmapped"
    mount --bind -o ro readonly readonly-mount
}

options_case() {
    local option_guests=() tag options
    (fill_shares)

    while read -r tag options; do
        read -ra options <<<"$options"
        start_daemon "$tag" "$work/shares/readonly" --readonly --xattr "${options[@]}"
        option_guests+=(--fs "$tag=$work/sockets/$tag")
    done <<'END'
readonly
readonly-always --cache=always
readonly-no-open --no-open
readonly-writeback --cache=always --writeback
readonly-metadata --cache=metadata
END
    option_share readonly-mount --xattr --cache=always
    start_daemon several '' --share "first=$work/shares/several/first" --share "second=$work/shares/several/second,ro"
    option_guests+=(--fs "several=$work/sockets/several")
    option_share xattrmap --xattrmap=:map::user.virtiofs.:
    # As docs/attributes.md says.
    option_share overlay --xattrmap=:map:trusted.:user.virtiofs.:
    option_share idmapped --translate-uid map:0:100000:65536 --translate-gid map:0:100000:65536
    option_share translate --translate-uid map:0:100000:65536 --translate-gid map:0:200000:65536 \
        --translate-uid forbid-guest:65536:10000
    option_share submounts
    option_share onefs --no-announce-submounts
    option_share readdir --no-readdirplus
    option_share limited --limit-bandwidth read=1M --limit-iops 100000 --report-size 4M
    option_share legacy -o xattr,cache=auto,sandbox=chroot
    user_daemons
    option_share user
    option_share user-none --sandbox none
    option_share user-mapped --uid-map ":0:$user:1:" --gid-map ":0:$user:1:"
    unset daemon_command

    guest options --kind "$1" "${option_guests[@]}" "$guest_dir/options.py" /mnt
    logs_are_clean "$work/daemons.logs" "the guest's user 1000, .* is refused"
    [[ $(from_tree getfattr --only-values -n user.virtiofs.trusted.b "$work/shares/xattrmap/mapped" 2>/dev/null) == 2 ]] ||
        fail "the mapped attribute is not on the host"
    owner_is mapped-ids/root-named 0:0
    owner_is mapped-ids/user-named 1000:1000
    owner_is translate/guests 101000:201001
    owner_is translate/created 101002:201002
    owner_is user/a/b/moved "$user:$user"
    owner_is user-none/a/b/moved "$user:$user"
    owner_is user-mapped/root "$user:$user"
    [[ $(<"$work/shares/user/a/b/moved") == 'from the guest' ]] || fail "the host does not see what the guest wrote"
}

owner_is() {
    local is
    is=$(stat -c %u:%g "$work/shares/$1")
    [[ $is == "$2" ]] || fail "$1 belongs to $is on the host, expected $2"
}

case_options_uml() { options_case uml; }
case_options_qemu() { options_case qemu; }

# user_daemons: the daemons that are started from now on run as an ordinary user.
user_daemons() {
    local binary
    # The user must be able to read it, and the checkout may be in root's own directory.
    read -ra binary <<<"$THRUWAY_DAEMON"
    install -m 755 "${binary[0]}" "$work/daemon"
    mkdir -p "$work/sockets"
    chmod 777 "$work/sockets"
    # shellcheck disable=SC2034  # start_daemon's
    daemon_command="$(as_user)$work/daemon"
}

# An ordinary user's daemons keep owners in an extended attribute: what root of the guest has set belongs to that user on the host.
ownership() {
    local option_guests=() found
    mkdir -p "$work"/shares/{kept,kept-none}
    chown "$user:$user" "$work"/shares/*
    user_daemons
    option_share kept --ownership=xattr --xattr
    option_share kept-none --ownership=xattr --xattr --sandbox=none
    unset daemon_command
    guest ownership --kind "$1" "${option_guests[@]}" "$guest_dir/ownership.py" /mnt
    logs_are_clean "$work/daemons.logs"
    found=$(find "$work/shares/kept" "$work/shares/kept-none" \( -not -uid "$user" -o -not -gid "$user" -o -not -type l \
        \( -perm /7022 -o -not -perm -600 -o -not -type f -not -type d \) \) -ls)
    [[ -z $found ]] || fail "not as on a disk of an ordinary user: $found"
    found=$(from_tree getfattr --only-values -n user.containers.override_stat "$work/shares/kept-none/root/etc/shadow")
    [[ $found == 0:42:0640:file ]] || fail "the attribute is $found"
}
case_ownership_uml() { ownership uml; }
case_ownership_qemu() { ownership qemu; }

# privileges KIND: set-user-ID and set-group-ID bits and file capabilities, in each cache mode, as on the guest's own tmpfs.
privileges() {
    local tag tags=() options counted
    while read -r tag options; do
        make_share "$tag"
        read -ra options <<<"$options"
        # The metrics are read after the guest's end.
        start_daemon "$tag" "$work/$tag" --keep-alive --control-path "$work/sockets/$tag.control" "${options[@]}"
        tags+=(--fs "$tag=$work/sockets/$tag")
    done <<'END'
auto --xattr
always --xattr --cache=always
metadata --xattr --cache=metadata --allow-mmap
never --xattr --cache=never --allow-mmap
writeback --xattr --writeback
plain --cache=always
mapped --cache=always --xattrmap=:map::user.virtiofs.:
direct --xattr --allow-direct-io --no-open --cache=auto
guests --no-killpriv-v2
guests-never --no-killpriv-v2 --cache=never --allow-mmap
count --xattr --cache=always
END
    mkdir "$work/count/count"
    guest privileges --kind "$1" --mem 768 "${tags[@]}" "$guest_dir/privileges.sh"
    counted=$(requests count Getxattr)
    note "$(requests count Write) writes: $counted GETXATTR"
    # The guest asks when it first writes, and again when it has looked at the attributes anew.
    ((counted <= 5)) || fail "1000 writes took $counted GETXATTR"
    logs_are_clean "$work/daemons.logs"
}
case_privileges() { privileges uml; }

# A directory with a project quota.
case_quotas() { in_qemu_machine quotas; }

quotas() {
    local mib=20 project=42
    modprobe loop
    truncate -s 300M "$work/disk"
    mkfs.ext4 -q -O quota,project -E quotatype=prjquota "$work/disk"
    make_share share
    mount -o loop,prjquota "$work/disk" "$work/share"
    mkdir "$work/share/limited"
    chattr -p "$project" +P "$work/share/limited"
    # quotactl(2) wants the device. Limits count in KiB there, usage in bytes (struct if_dqblk).
    python3 - "$(findmnt -no SOURCE "$work/share")" "$project" "$((mib << 10))" <<'END'
import ctypes, os, struct, sys

Q_SETQUOTA, PRJQUOTA, QIF_BLIMITS = 0x800008, 2, 1
device, project, limit = sys.argv[1].encode(), int(sys.argv[2]), int(sys.argv[3])
block = ctypes.create_string_buffer(struct.pack("=8QI4x", limit, limit, 0, 0, 0, 0, 0, 0, QIF_BLIMITS))
libc = ctypes.CDLL(None, use_errno=True)
if libc.quotactl(ctypes.c_int(Q_SETQUOTA << 8 | PRJQUOTA), device, project, block):
    sys.exit(f"quotactl: {os.strerror(ctypes.get_errno())}")
END
    start_daemon s "$work/share"
    "$boot" --kind uml --log-dir "$work/guest.logs" --ro-dir "$guest_dir" --fs "s=$work/sockets/s" --timeout 1800 \
        --kernel-args seccomp=on "$guest_dir/quotas.py" /mnt/s "$mib" "$project" || fail 'the guest does not see the quota'
    logs_are_clean "$work/guest.logs" && logs_are_clean "$work/daemons.logs"
}

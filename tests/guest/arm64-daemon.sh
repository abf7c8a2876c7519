#!/bin/bash
# In an arm64 guest: the daemon of the Debian package and the static one, with their sandbox and their seccomp filter, and test programs
# that start the packaged daemon where they expect the one that was built with them: arm64-daemon.sh PROGRAM DIRECTORY
set -euo pipefail
daemon=$1 scratch=$2
# The guest's root cannot be written to. The new one is not a chroot, where the sandbox of an ordinary user could not be made.
new=/tmp/root
mount -t tmpfs -o size=100% tmpfs /tmp
mkdir $new
mount --bind $new $new
cp -ax / $new
mkdir -p $new/{proc,sys,dev,tmp,host,run,root,mnt,old}
for directory in proc sys dev run host; do mount --rbind /$directory $new/$directory; done
cd $new
pivot_root . old
cd /
mount -t tmpfs tmpfs /tmp
# The tree was unpacked, not installed: dpkg knows of no package there, and nobody has chosen a shell.
ln -s bash /usr/bin/sh
mkdir -p /var/lib/dpkg/{info,updates}
: >>/var/lib/dpkg/status
dpkg --force-depends --force-bad-path --install /host/thruway.deb

bench() { thruway-bench --seconds 0.2 --warm-up 0.1 --rounds 1 --workload "$1" "$2 --socket-path {socket} --shared-dir {share}"; }
bench lookup-new,create,readdirplus,fsync,compile /usr/libexec/thruwayd
bench statfs /host/static/libexec/thruwayd

mkdir -p "${daemon%/*}" "$scratch"
ln -s /usr/libexec/thruwayd "$daemon"
failed=''
for test in /host/tests/*; do
    name=${test##*/}
    start=$SECONDS
    # Those read the disk, and here is none.
    "$test" --skip a_cold_ >"/tmp/$name" 2>&1 || failed+=" $name"
    printf '%s: %s s\n' "$name" "$((SECONDS - start))"
    grep -vE '^test .* \.\.\. (ok|ignored)|^$|^running' "/tmp/$name" || true
done
[[ -z $failed ]] || { printf 'FAILED:%s\n' "$failed" && exit 1; }

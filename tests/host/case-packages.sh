# shellcheck shell=bash disable=SC2154  # lib.sh sets them
# What make packages makes: each package is installed in a clean tree, and the daemon from there serves guests.

# clean_root NAME: a copy of the guests' Debian tree in $work/NAME/root, which has systemd and nothing of Thruway. Its share is
# /srv/share, on the host's disk in $work/NAME/share.
clean_root() {
    local base=$work/$1 tree
    tree=$(. "$root/vm-images/lib.sh" && tree_dir)/root
    mkdir -p "$base"/{root,share,changes}
    mount -t tmpfs tmpfs "$base/changes"
    mkdir "$base/changes"/{upper,work}
    mount -t overlay -o "lowerdir=$tree,upperdir=$base/changes/upper,workdir=$base/changes/work" overlay "$base/root"
    mount_system "$base/root"
    mkdir "$base/root/srv/share"
    mount --bind "$base/share" "$base/root/srv/share"
    # The tree's dpkg leaves out documents and manual pages.
    rm -f "$base/root"/etc/dpkg/dpkg.cfg.d/*
}

# mount_system ROOT: what a container has besides its root.
mount_system() {
    local node
    mkdir -p "$1"/{proc,run,tmp,dev,sys}
    mount -t tmpfs -o mode=755 tmpfs "$1/run"
    mount -t tmpfs -o mode=755 tmpfs "$1/dev"
    mkdir "$1/dev/shm"
    for node in null zero full random urandom tty fuse; do
        : >"$1/dev/$node"
        mount --bind "/dev/$node" "$1/dev/$node"
    done
    mount -t tmpfs tmpfs "$1/tmp"
}

# start_systemd NAME: boots the systemd of $work/NAME/root in namespaces, and a cgroup, of its own. in_machine NAME COMMAND... runs a
# command there.
start_systemd() {
    local base=$work/$1 outer deadline=$((SECONDS + 60))
    # shellcheck disable=SC2016  # the inner shell's variables
    setsid unshare --mount --propagation slave --pid --ipc --uts --net --fork --kill-child bash -c '
        set -e
        cd "$1"
        mount -t cgroup2 cgroup2 sys
        mkdir -p "sys/$2"
        echo 0 >"sys/$2/cgroup.procs"
        umount sys
        exec unshare --cgroup bash -c "
            set -e
            mount -t proc proc proc
            # Its settings are for a machine of its own.
            mount --bind proc/sys proc/sys
            mount -o remount,bind,ro proc/sys
            mount -t sysfs -o ro sysfs sys
            mount -t cgroup2 cgroup2 sys/fs/cgroup
            # systemd makes them shared, but not in a container.
            mount --make-rshared .
            exec env -i container=thruway-test PATH=/usr/sbin:/usr/bin:/sbin:/bin \
                chroot . /lib/systemd/systemd --unit=basic.target --log-target=console --log-level=info
        "' start_systemd "$base/root" "thruway-test-$$-$1" >"$base/systemd.log" 2>&1 </dev/null &
    outer=$!
    # 60 s: it needs two or three.
    until printf -v "machine_$1" '%d' "$(cat "/proc/$outer"/task/*/children 2>/dev/null | tr -d ' ')" && [[ -S $base/root/run/systemd/private ]] &&
        [[ $(in_machine "$1" systemctl is-system-running) == running ]]; do
        { ((SECONDS < deadline)) && kill -0 "$outer" 2>/dev/null; } ||
            fail "systemd did not start in $1: $(in_machine "$1" systemctl --failed 2>&1; tail -n 5 "$base/systemd.log")"
        sleep 0.1
    done
}

in_machine() {
    local pid=machine_$1
    nsenter -t "${!pid}" --all --root --wdns=/ -- /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin "${@:2}"
}

stop_systemd() {
    local pid=machine_$1
    # SIGRTMIN+4 is systemd's power off.
    kill -s RTMIN+4 "${!pid}"
    wait_gone 60 "${!pid}" || fail "systemd of $1 does not end"
    find "$(findmnt -n -o TARGET -t cgroup2 | head -n 1)/thruway-test-$$-$1" -depth -type d -exec rmdir {} +
}

# files NAME: lists the files of the tree with their types, except for what dpkg, rpm, systemd and the share keep.
files() {
    in_machine "$1" find / -xdev \( -path /var/lib/dpkg -o -path /var/lib/rpm -o -path /var/log -o -path /var/lib/systemd \
        -o -path /var/cache -o -path /srv \) -prune -o -printf '%y %m %p\n' | sort
    in_machine "$1" find /run/thruway /srv 2>/dev/null | grep -v '^/srv' || true
}

# enable_share NAME OPTIONS: the share "data", by the units.
enable_share() {
    printf 'SHARED_DIR=/srv/share\nOPTIONS=%s\n' "$2" >"$work/$1/root/etc/thruway/data.conf"
    in_machine "$1" systemctl enable --quiet --now thruwayd@data.socket
}

# serve NAME DIRECTORY SOCKET BOOT-ARGUMENT...: a guest reads and writes the share, which is DIRECTORY on the host.
serve() {
    local name=$1 directory=$2 socket=$3
    echo host >"$directory/from-the-host"
    guest "$name" --fs "data=$socket" "${@:4}"
    [[ $(cat "$directory/from-the-guest") == guest ]] || fail "the guest $name wrote nothing"
    rm "$directory"/from-the-*
}

# session_ended NAME: the guest has gone, and so does its daemon, which has logged no error. The socket stays.
session_ended() {
    local deadline=$((SECONDS + 60))
    while [[ $(in_machine "$1" systemctl is-active thruwayd@data.service) != inactive ]]; do
        ((SECONDS < deadline)) || fail "the daemon stayed: $(in_machine "$1" systemctl status --lines=20 thruwayd@data.service 2>&1)"
        sleep 0.1
    done
    [[ $(in_machine "$1" systemctl is-active thruwayd@data.socket) == active ]] || fail 'the socket has gone'
    in_machine "$1" journalctl --quiet --output=cat --unit=thruwayd@data.service >"$work/$1/daemon.log"
    # The machine has a cgroup namespace, as a container.
    logs_are_clean "$work/$1" 'their guard cannot leave the control group'
}

# nothing_left NAME: after the removal the tree is as it was when its files were listed to $work/NAME/before.
nothing_left() {
    local left
    files "$1" >"$work/$1/after"
    left=$(diff "$work/$1/before" "$work/$1/after") || fail "the package left something behind: $left"
    [[ -z $(in_machine "$1" pgrep -f thruwayd) ]] || fail 'a daemon still runs'
}

# The limit of systemd-analyze's exposure, times ten. It was 50 when the unit was written: the share needs a daemon of root that may
# mount.
exposure=55

deb_package() {
    local unit
    clean_root deb
    start_systemd deb
    files deb >"$work/deb/before"
    cp "$1" "$work/deb/root/tmp/thruway.deb"
    in_machine deb dpkg --install /tmp/thruway.deb || fail 'dpkg does not install the package'
    # systemd-analyze takes files, and the instance from their names.
    mkdir "$work/deb/root/tmp/units"
    for unit in service socket; do cp "$work/deb/root/usr/lib/systemd/system/thruwayd@.$unit" "$work/deb/root/tmp/units/thruwayd@data.$unit"; done
    in_machine deb systemd-analyze verify --man=no /tmp/units/thruwayd@data.service /tmp/units/thruwayd@data.socket ||
        fail 'the units are not valid'
    in_machine deb systemd-analyze security --offline=true --no-pager --threshold="$exposure" /tmp/units/thruwayd@data.service \
        >"$work/security" || fail "the unit is exposed more than before: $(grep -v '✓' "$work/security")"
    # shellcheck disable=SC2016  # the inner shell's variables
    in_machine deb bash -c 'thruway --version && thruwayd=$(sed -n "s/.*\"binary\": \"\(.*\)\",/\1/p" /usr/share/qemu/vhost-user/50-thruway.json) &&
        $thruwayd --print-capabilities' || fail 'the programs do not run'

    # The whole suite, since the unit's restrictions must not change the share.
    enable_share deb '--posix-acl --allow-direct-io --killpriv-v2 --posix-lock --flock'
    guest deb --kind uml --fs "data=$work/deb/root/run/thruway/data.sock" "$guest_dir/functional.py" /mnt/data
    session_ended deb
    # The next guest gets another daemon. What the host mounts meanwhile is seen.
    start_submount &
    serve deb-again "$work/deb/share" "$work/deb/root/run/thruway/data.sock" "$guest_dir/installed.py" /mnt/data submount
    session_ended deb
    in_machine deb umount /srv/share/below || fail 'a submount stays busy'

    # A window, with its process and the guard.
    enable_share deb '--dax-window=128M,required --log-level=debug'
    seq 200000 | sed '1s/.*/host/' >"$work/deb/share/mapped"
    echo host >"$work/deb/share/from-the-host"
    start_window_guest deb-window --fs "data=$work/deb/root/run/thruway/data.sock" --mount-opts dax=always \
        "$guest_dir/installed.py" /mnt/data window
    # A host process truncates the mapped file. Without the guard, QEMU could end by SIGBUS. 120 s: the guest's boot, under emulation.
    (wait_line "$work/deb/share/is-mapped" mapped 120 "$guest_pid") ||
        fail "no file is mapped: $(in_machine deb journalctl --quiet --output=cat --lines=5 --unit=thruwayd@data.service; tail -n 5 "$work/deb-window.out")"
    # Who opens a mapped file waits for the window process, which a frozen unit does not stop. systemctl freeze would need a bus; it
    # does the same. 60 s: a hang has no end.
    # shellcheck disable=SC2016  # the inner shell's
    in_machine deb bash -euc 'cd "/sys/fs/cgroup$(systemctl show --property=ControlGroup --value thruwayd@data.service)"; echo 1 >cgroup.freeze
        until grep -q "^frozen 1" cgroup.events; do sleep 0.1; done' || fail 'the unit cannot be frozen'
    in_machine deb timeout 60 head -c 1 /srv/share/mapped >"$work/head" || fail 'a host process waits for a frozen unit'
    # shellcheck disable=SC2016  # the inner shell's
    in_machine deb bash -euc 'cd "/sys/fs/cgroup$(systemctl show --property=ControlGroup --value thruwayd@data.service)"; echo 0 >cgroup.freeze
        until grep -q "^frozen 0" cgroup.events; do sleep 0.1; done'
    truncate --size 6 "$work/deb/share/mapped"
    : >"$work/deb/share/looked"
    finish_window_guest deb-window
    session_ended deb
    [[ $(head -n 1 "$work/deb/share/mapped") == guest ]] || fail 'the window did not reach the file'

    # With a share in use. An update of the package reaches a supervised daemon.
    enable_share deb '--supervise'
    in_machine deb systemctl start thruwayd@data.service
    in_machine deb dpkg --install /tmp/thruway.deb || fail 'dpkg does not install the package again'
    in_machine deb journalctl --quiet --output=cat --unit=thruwayd@data.service >"$work/deb/daemon.log"
    grep -q 'upgraded from version' "$work/deb/daemon.log" || fail "the daemon was not upgraded: $(cat "$work/deb/daemon.log")"
    [[ $(in_machine deb systemctl is-active thruwayd@data.service) == active ]] || fail 'the upgraded daemon has ended'
    in_machine deb dpkg --purge thruway || fail 'dpkg does not remove the package'
    nothing_left deb
    stop_systemd deb
}

start_submount() {
    wait_line "$work/deb/share/from-the-guest" guest 60
    in_machine deb bash -c 'mkdir /srv/share/below && mount -t tmpfs tmpfs /srv/share/below && : >/srv/share/below/here'
}

rpm_package() {
    clean_root rpm
    start_systemd rpm
    # The tree has dpkg's packages: rpm knows of no libc there.
    local rpm=(rpm --root "$work/rpm/root" --dbpath /var/lib/rpm --nodeps)
    # Every distribution with RPM has these, by its package filesystem.
    mkdir -p "$work/rpm/root/usr/share"/{licenses,man/man1,man/man8}
    files rpm >"$work/rpm/before"
    "${rpm[@]}" --install "$1" || fail 'rpm does not install the package'
    in_machine rpm systemctl daemon-reload
    enable_share rpm ''
    serve rpm "$work/rpm/share" "$work/rpm/root/run/thruway/data.sock" --kind uml "$guest_dir/installed.py" /mnt/data
    session_ended rpm
    # Outside of the machine, rpm's scripts cannot stop units.
    in_machine rpm systemctl disable --quiet --now thruwayd@data.socket
    rm "$work/rpm/root/etc/thruway/data.conf"
    "${rpm[@]}" --erase thruway || fail 'rpm does not remove the package'
    in_machine rpm systemctl daemon-reload
    nothing_left rpm
    stop_systemd rpm
}

# guest_package DIRECTORY: what the guest agent's packages in it have is the same program. It is started with the system, and goes with
# its package. Then it serves a guest.
guest_package() {
    local out=$1 rpm program=usr/libexec/thruway-guest machine
    clean_root agent
    start_systemd agent
    files agent >"$work/agent/before"
    cp "$out"/thruway-guest_*_"$(dpkg --print-architecture)".deb "$work/agent/root/tmp/agent.deb"
    in_machine agent dpkg --install /tmp/agent.deb || fail 'dpkg does not install the agent'
    [[ $(in_machine agent systemctl is-enabled thruway-guest.service) == enabled ]] || fail 'the agent does not start with the system'
    in_machine agent systemd-analyze verify --man=no thruway-guest.service || fail "the agent's unit is not valid"
    in_machine agent /$program --version || fail 'the packaged agent does not run'
    with_agent "$work/agent/root/$program"
    in_machine agent dpkg --purge thruway-guest || fail 'dpkg does not remove the agent'
    # The tree has dpkg's packages: rpm knows of no libc there.
    rpm=(rpm --root "$work/agent/root" --dbpath /var/lib/rpm --nodeps)
    "${rpm[@]}" --install "$out"/thruway-guest-*."$(uname -m)".rpm || fail 'rpm does not install the agent'
    cmp "$work/agent/root/$program" "$guest_dir/thruway-guest" || fail 'the packages have different programs'
    [[ -L $work/agent/root/etc/systemd/system/multi-user.target.wants/thruway-guest.service ]] || fail "the rpm's agent does not start with the system"
    "${rpm[@]}" --erase thruway-guest || fail 'rpm does not remove the agent'
    in_machine agent systemctl daemon-reload
    nothing_left agent
    stop_systemd agent
    for program in "$out"/thruway-guest-*-static.tar.gz; do
        machine=$(tar -xOf "$program" ./libexec/thruway-guest | tee "$work/program" | wc -c)
        # Guests' images are small.
        ((machine <= 1 << 20)) || fail "the agent of $program has $machine bytes"
        ! readelf -lW "$work/program" | grep -q INTERP || fail "the agent of $program needs a loader"
        note "$(basename "$program"): $(readelf -hW "$work/program" | sed -n 's/^ *Machine: *//p'), $machine bytes"
    done
    start_daemon s "$work/agent/share"
    guest agent --kind uml --no-mount --fs "s=$work/sockets/s" "$guest_dir/agent-installed.py"
}

# The guest kernel's patches: the same in both packages, all of them, in their order.
guest_kernel_package() {
    local out=$work/guest-kernel patches
    mkdir -p "$out/tar" "$out/deb"
    tar -C "$out/tar" -xf "$1"
    dpkg-deb -x "$2" "$out/deb"
    diff -r "$out/tar" "$out/deb/usr/src/thruway-guest-kernel" || fail 'the packages of the patches differ'
    mapfile -t patches < <(. "$root/vm-images/lib.sh" && printf '%s\n' "${guest_patches[@]}")
    (cd "$out/tar" && xargs cat <series) | cmp - <(cat "${patches[@]}") || fail 'patches are missing, or in another order'
}

# The release daemon, with the other programs as the unit tests build them, in $work/programs.
programs_to_pack() {
    mkdir "$work/programs"
    (cd "$root" && CARGO_TARGET_DIR=$root/target cargo build --quiet --package thruway-bench --package thruway-tool --bins)
    cp "$root"/target/debug/{thruway,thruway-bench} "$THRUWAY_DAEMON" "$work/programs/"
}

# soak_packages_all has release builds of all programs.
case_packages() {
    local programs=$work/programs
    programs_to_pack
    make_packages "$root" "$programs" "$work/packages"
    # From another directory, by another user's settings, with files of other times.
    mkdir "$work/elsewhere"
    (umask 077 && cd "$root" && git ls-files -z | tar --null -T - -cf - | tar -C "$work/elsewhere" --no-same-permissions -m -xf - &&
        TZ=Asia/Tokyo VERSION=$(version) SOURCE_DATE_EPOCH=$(git -C "$root" log -1 --format=%ct) &&
        export TZ VERSION SOURCE_DATE_EPOCH && make_packages "$work/elsewhere" "$programs" "$work/packages-again")
    diff -r "$work/packages" "$work/packages-again" || fail 'the packages are not reproducible'
    deb_package "$work"/packages/thruway_*.deb
    rpm_package "$work"/packages/thruway-[!g]*.rpm
    guest_package "$work/packages"
    guest_kernel_package "$work"/packages/thruway-guest-kernel-*.tar.gz "$work"/packages/thruway-guest-kernel-*.deb
}

# make_packages SOURCE PROGRAMS DIRECTORY: those packages that need no other build.
make_packages() {
    "$1/packaging/build" --out "$3" --programs "$2" deb rpm guest guest-kernel || fail 'packaging/build failed'
}
version() { basename "$work"/packages/thruway_*.deb | sed 's/^thruway_\(.*\)-1_.*/\1/'; }

# All packages by release builds from two directories: the same bytes. cargo install.
soak_packages_all() {
    local clone=$work/clone
    git clone --quiet "$root" "$clone"
    for source in "$root" "$clone"; do
        rm -rf "$source/target/packages"
        make -C "$source" packages || fail 'make packages failed'
    done
    diff -r "$root/target/packages" "$clone/target/packages" || fail 'the packages are not reproducible'
    { cargo install --quiet --locked --path "$root" --root "$work/cargo" && "$work/cargo/bin/thruwayd" --version; } || fail 'cargo install failed'
    soak_packages_made
}

# What make packages has made: each package is tried. Static programs run in a tree without anything else, and as the container's image
# would run them. The patches apply to Linux.
soak_packages_made() {
    local out=$root/target/packages
    deb_package "$out"/thruway_*_"$(dpkg --print-architecture)".deb
    rpm_package "$out"/thruway-[!g]*."$(uname -m)".rpm
    static_tarball "$out"/thruway-[!g]*-"$(uname -m)"-static-*.tar.gz
    arm64_packages "$out"
    container_image "$out/container"
    guest_package "$out"
    guest_kernel_package "$out"/thruway-guest-kernel-*.tar.gz "$out"/thruway-guest-kernel-*.deb
    patches_apply "$out"/thruway-guest-kernel-*.tar.gz
}

# arm64_packages DIRECTORY: its packages for arm64 have the files of those for x86-64, and programs that start.
arm64_packages() {
    local into=$work/arm64 architecture program built sysroot=/usr/aarch64-linux-gnu emulator
    "$root/vm-images/setup.sh" cross-packages tree arm64
    emulator=$(. "$root/vm-images/lib.sh" && arm64_dir)/qemu-aarch64
    for architecture in amd64 arm64; do
        mkdir -p "$into/$architecture"
        dpkg-deb -x "$1"/thruway_*_"$architecture".deb "$into/$architecture"
    done
    # Of the programs, and of what compressed files have in them, only the names.
    diff <(cd "$into/amd64" && find . -printf '%m %p\n' | sort) <(cd "$into/arm64" && find . -printf '%m %p\n' | sort) ||
        fail 'the packages for arm64 have other files'
    mkdir -p "$into/rpm" "$into/static"
    rpm2cpio "$1"/thruway-[!g]*.aarch64.rpm | (cd "$into/rpm" && cpio --quiet -idm)
    tar -C "$into/static" -xf "$1"/thruway-[!g]*-aarch64-static-*.tar.gz
    for program in libexec/thruwayd bin/thruway bin/thruway-bench; do
        cmp "$into/arm64/usr/$program" "$into/rpm/usr/$program" || fail 'the packages for arm64 have different programs'
        for built in "$into/arm64/usr/$program" "$into/static/$program"; do
            readelf -h "$built" | grep -q 'Machine: *AArch64' || fail "$built is not for arm64"
            "$emulator" -L "$sysroot" "$built" --version || fail "$built does not start"
        done
        ! readelf -lW "$built" | grep -q INTERP || fail "$built needs a loader"
    done
    note "thruway for arm64 depends on $(dpkg-deb -f "$1"/thruway_*_arm64.deb Depends)"
}

# The programs of the packages for arm64 in a guest of that machine, whose kernel knows seccomp and namespaces: the daemon with its usual
# sandbox, and test programs that start it.
soak_packages_arm64() {
    local made=$work/packages target=aarch64-unknown-linux-gnu test
    "$root/vm-images/setup.sh" cross-packages tree arm64
    rustup target add "$target" aarch64-unknown-linux-musl
    programs_to_pack
    "$root/packaging/build" --out "$made" --programs "$work/programs" deb rpm || fail 'packaging/build failed'
    "$root/packaging/build" --out "$made" --programs "$work/programs" --machine aarch64 deb rpm static || fail 'packaging/build failed'
    arm64_packages "$made"
    with_agent
    mkdir "$work/guest/tests"
    cp "$made"/thruway_*_arm64.deb "$work/guest/thruway.deb"
    cp -r "$work/arm64/static" "$work/guest/"
    # Those that start the daemon.
    arm64_tests --no-run --message-format=json --package thruway --test sandbox --test control --test frontends --test hostile_files \
        --test idle --test reads >"$work/built" || fail 'the tests cannot be built'
    while read -r test; do
        aarch64-linux-gnu-strip -o "$work/guest/tests/${test##*/}" "$test"
    done < <(python3 -c '
import json, sys
for line in sys.stdin:
    message = json.loads(line)
    if message.get("profile", {}).get("test"): print(message["executable"])' <"$work/built")
    # An hour: it needs minutes, and more on a busy machine.
    guest arm64 --kind arm64 --mem 2048 --cpus 2 --no-mount --timeout 3600 "$guest_dir/arm64-daemon.sh" \
        "$root/target/$target/debug/thruwayd" "$root/target/$target/tmp"
}

# arm64_tests ARGUMENT...: cargo test for arm64.
arm64_tests() {
    (cd "$root" && CARGO_TARGET_DIR=$root/target CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
        cargo test --locked --target aarch64-unknown-linux-gnu "$@")
}

# The unit tests, and those with a frontend in the same process, by QEMU's emulation of user programs. It has no seccomp, fanotify,
# io_uring, cachestat(2) nor ioctls of files' flags, and starts no other program, so that soak_packages_arm64 has the other tests.
soak_arm64_tests() {
    local emulator
    "$root/vm-images/setup.sh" cross-packages tree arm64
    emulator=$(. "$root/vm-images/lib.sh" && arm64_dir)/qemu-aarch64
    rustup target add aarch64-unknown-linux-gnu
    CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="$emulator -L /usr/aarch64-linux-gnu" arm64_tests --workspace --exclude xtask --lib \
        --test hostile --test frontend --test frontend_leaks --test window --test bounds -- --skip watch::tests --skip lease --skip flags \
        --skip the_agent_looks_at_everything --skip a_file_in_memory_is_whole || fail 'tests failed'
}

# bare_root NAME: an empty tree with the mounts of a container.
bare_root() {
    mkdir -p "$work/$1"/{root,share}
    mount --bind "$work/$1/root" "$work/$1/root"
    mount_system "$work/$1/root"
    mkdir "$work/$1/root"/{share,run/thruway}
    mount --bind "$work/$1/share" "$work/$1/root/share"
}

# run_bare NAME COMMAND...: the daemon with the tree as its root, in namespaces of its own; then a guest uses it.
run_bare() {
    local name=$1 socket=$work/$1/root/run/thruway/fs.sock deadline=$((SECONDS + 60))
    shift
    # shellcheck disable=SC2016  # the inner shell's variables
    setsid unshare --mount --pid --net --ipc --uts --fork --kill-child bash -c '
        cd "$1"
        shift
        mount -t proc proc proc
        exec "$@"' run_bare "$work/$name/root" "$@" >"$work/$name/daemon.log" 2>&1 &
    until [[ -S $socket ]]; do
        ((SECONDS < deadline)) || fail "the daemon of $name does not listen: $(cat "$work/$name/daemon.log")"
        sleep 0.1
    done
    serve "$name" "$work/$name/share" "$socket" --kind uml "$guest_dir/installed.py" /mnt/data
    logs_are_clean "$work/$name"
}

static_tarball() {
    bare_root static
    mkdir -p "$work/static/root/usr/local"
    tar -C "$work/static/root/usr/local" -xf "$1"
    note "static: $(basename "$1")"
    ! readelf -l "$work/static/root/usr/local/libexec/thruwayd" | grep -q INTERP || fail 'the static daemon needs a loader'
    run_bare static chroot . /usr/local/libexec/thruwayd --socket-path /run/thruway/fs.sock --shared-dir /share --tag data
    "$work/static/root/usr/local/bin/thruway" --version || fail 'the static tool does not run'
}

# What docker would do with the Dockerfile FROM scratch: ADD unpacks the tarball, and a container has these capabilities.
container_image() {
    local command caps=chown,dac_override,fowner,fsetid,kill,setgid,setuid,setpcap,net_bind_service,net_raw,sys_chroot,mknod,audit_write
    caps+=,setfcap
    bare_root image
    mkdir -p "$work/image/root$(sed -n 's/^ADD thruway-\*\.tar\.gz //p' "$1/Dockerfile")"
    tar -C "$work/image/root$(sed -n 's/^ADD thruway-\*\.tar\.gz //p' "$1/Dockerfile")" -xf "$1"/thruway-*.tar.gz
    mapfile -t command < <(sed -n 's/^\(ENTRYPOINT\|CMD\) //p' "$1/Dockerfile" | python3 -c '
import json, sys
for line in sys.stdin: print(*json.loads(line), sep="\n")')
    ((${#command[@]} > 1)) || fail 'the Dockerfile has no command'
    run_bare image setpriv --bounding-set="-all,+${caps//,/,+}" chroot . "${command[@]}" --tag data
}

# As INSTALL.md tells Debian's users.
patches_apply() (
    local apt=$work/linux-apt linux=$work/linux
    mkdir -p "$work/patches" "$linux"
    tar -C "$work/patches" -xf "$1"
    . "$root/vm-images/lib.sh"
    private_apt "$apt"
    cd "$apt" || return
    APT_CONFIG=$apt/apt.conf apt-get --quiet download linux-source-7.2/trixie-backports ||
        APT_CONFIG=$apt/apt.conf apt-get --quiet download linux-source-7.2
    dpkg-deb -x linux-source-*.deb "$apt"
    tar -xf "$apt"/usr/src/linux-source-7.2.tar.xz -C "$linux" --strip-components=1
    "$work/patches/apply" "$linux" || fail 'the packaged patches do not apply'
    grep -q VIRTIO_FS_PASSTHROUGH "$linux/fs/fuse/Kconfig" || fail 'the packaged patches changed nothing'
)

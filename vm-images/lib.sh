# shellcheck shell=bash
# Shared functions of the scripts in this directory.

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/thruway

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() { say "$*"; exit 1; }

# artefact NAME FILE...: prints the cache directory of NAME, which is built from these files.
artefact() {
    local name=$1
    shift
    # 12 digits are enough to tell apart the few dozen versions that a cache ever holds.
    printf '%s/%s-%s\n' "$cache" "$name" "$(cat -- "$@" | sha256sum | cut -c1-12)"
}

tools_dir() { artefact tools "$here/build-tools"; }
tree_dir() { artefact tree "$here/build-tree" "$here/packages/tree.list"; }
programs_dir() { artefact programs "$here/build-programs" "$here/packages/programs.list" "$here/packages/tree.list"; }
callers_dir() { artefact callers "$here/build-callers" "$here/packages/callers.list" "$here/packages/tree.list"; }
distributed_dir() { artefact distributed "$here/build-distributed" "$here/packages/distributed.list" "$here/packages/tree.list"; }
uml_smp_dir() { artefact uml-smp "$here/build-uml-smp" "$here/linux-source.sh" "$here/uml-smp.config" "${uml_patches[@]}"; }
# Debian's kernel source, without patches.
linux_source_dir() { artefact linux-source "$here/linux-source.sh"; }
arm64_dir() { artefact arm64 "$here/build-arm64" "$here/packages/arm64.list" "$here/packages/tree.list"; }
# Has kernels by their series: 6.12, 6.1.
old_kernel_dir() { artefact old-kernel "$here/build-old-kernel"; }

# guest_kernel_dir NAME...: the guest kernel with these configurations of guest-kernel/configs.
guest_kernel_dir() {
    local suffix=${*:2} configs=("${@/#/$guest_kernel/configs/}")
    artefact "guest-kernel${suffix:+-${suffix// /-}}" "$guest_kernel/build" "$here/linux-source.sh" \
        "${configs[@]/%/.config}" "${guest_patches[@]}"
}

# QEMU with the patches of qemu/.
qemu_dir() { artefact qemu "$qemu/build" "${qemu_patches[@]}"; }

qemu=$here/../qemu
qemu_patches=("$qemu"/*.patch)
guest_kernel=$here/../guest-kernel
# The series of guest-kernel in the order in which they apply.
guest_series=(fixes passthrough)
# These apply to the guest kernel only.
guest_patches=()
for series in "${guest_series[@]}"; do guest_patches+=("$guest_kernel/$series"/*.patch); done
unset series
# These apply to User-Mode Linux only.
uml_patches=("$here"/uml-patches/*.patch)

package_list() { grep -vE '^(#|$)' "$here/packages/$1.list"; }

# logged TITLE COMMAND...: runs the command with its output in a log of the cache. Shows its last line every 10 s, and the
# end of the log if it fails.
logged() {
    local title=$1 log=$cache/logs/${1// /-}.log status=0 start=$SECONDS job ticker=''
    shift
    mkdir -p "$cache/logs"
    say "$title ..."
    # Its own process group, so that an interrupt can end it with all its children.
    set -m
    "$@" >"$log" 2>&1 </dev/null &
    job=$!
    set +m
    trap 'kill -- "-$job" $ticker 2>/dev/null; exit 130' INT TERM HUP
    # 10 s: often enough to see progress, seldom enough to read.
    (while sleep 10 >&- 2>&-; do
        say "$title, $((SECONDS - start)) s: $(tail -c 300 "$log" | tr '\r' '\n' | tail -n 1 | cut -c1-100)"
    done) &
    ticker=$!
    wait "$job" || status=$?
    kill "$ticker"
    wait "$ticker" 2>/dev/null || true
    trap - INT TERM HUP
    if ((status)); then
        # 30 lines hold a compiler's error with its context.
        tail -n 30 "$log" >&2
        die "$title failed (status $status); the whole log: $log"
    fi
    say "$title: done in $((SECONDS - start)) s"
}

# build_once DIRECTORY FUNCTION: unless DIRECTORY exists, runs FUNCTION to fill $partial and renames that to DIRECTORY.
# A lock keeps other processes from building the same directory.
build_once() {
    local directory=$1 fill=$2
    [[ ! -d $directory ]] || return 0
    mkdir -p "$cache"
    exec 9>"$directory.lock"
    flock 9
    if [[ ! -d $directory ]]; then
        partial=$directory.partial
        rm -rf "$partial"
        mkdir "$partial"
        "$fill"
        mv "$partial" "$directory"
    fi
    exec 9>&-
    rm -f "$directory.lock"
}

keyring=/usr/share/keyrings/debian-archive-keyring.gpg

# Prints the Debian mirror that this machine's apt uses, or mmdebstrap's default where apt has none.
debian_mirror() {
    local mirror
    # shellcheck disable=SC2016  # apt's own variable
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' 'Origin: Debian' 'Label: Debian' | sed -n 1p)
    if [[ -z $mirror ]]; then
        # shellcheck disable=SC2016  # $1 is the hook's
        mirror=$(mmdebstrap --quiet --variant=custom --setup-hook='grep -ohE "https?://[^ ]+" -r "$1/etc/apt" >&2; exit 1' \
            trixie /dev/null 2>&1 >/dev/null | grep -m 1 -oE 'https?://[^ ]+' || true)
    fi
    [[ -n $mirror ]] || die "no Debian mirror found: is there one in /etc/apt? (apt-get update)"
    printf '%s\n' "$mirror"
}

# debian_sources SUITE...: prints the sources: trixie, its updates and backports, sid, and these. A mirror of sid may be out of date.
debian_sources() {
    local mirror suite
    mirror=$(debian_mirror)
    for suite in trixie trixie-updates trixie-backports "$@"; do
        printf 'deb [signed-by=%s] %s %s main\n' "$keyring" "$mirror" "$suite"
    done
    printf 'deb [signed-by=%s check-valid-until=no] %s sid main\n' "$keyring" "$mirror"
}

# debian_preferences: sid provides only user-mode-linux; backports provide QEMU with its firmware.
debian_preferences() {
    cat <<'END'
Package: *
Pin: release n=sid
Pin-Priority: -1

Package: user-mode-linux
Pin: release n=sid
Pin-Priority: 500

Package: src:qemu src:seabios src:ipxe
Pin: release n=trixie-backports
Pin-Priority: 500
END
}

# How often apt tries to download a file: a mirror may fail for some seconds.
apt_tries=5

# private_apt DIRECTORY SUITE...: sets up an apt in DIRECTORY that leaves the host's alone. Use it with APT_CONFIG=DIRECTORY/apt.conf. It knows
# these suites of Debian besides the usual ones. It is for the machine $architecture if that is set.
private_apt() {
    mkdir -p "$1"/{state/lists/partial,cache/archives/partial,preferences.d}
    debian_sources "${@:2}" >"$1/sources.list"
    : >"$1/status"
    cat >"$1/apt.conf" <<END
Dir::State "$1/state";
Dir::State::status "$1/status";
Dir::Cache "$1/cache";
Dir::Etc::sourcelist "$1/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::Etc::preferences "/dev/null";
Dir::Etc::preferencesparts "$1/preferences.d";
Dir::Etc::trusted "$keyring";
Acquire::Languages "none";
Acquire::Retries "$apt_tries";
Acquire::IndexTargets::deb::DEP-11::DefaultEnabled "false";
APT::Sandbox::User "root";
${architecture:+APT::Architecture "$architecture"; APT::Architectures { "$architecture"; };}
END
    APT_CONFIG=$1/apt.conf apt-get --quiet update
}

# guest-kernel and docs/benchmarks.md are about this series.
debian_series=7.2

# pick_kernel FLAVOUR: sets $kernel to the newest kernel of the series and this flavour, or of trixie-backports if the series is gone.
pick_kernel() {
    local series=$debian_series versions
    versions=$(apt-cache pkgnames linux-modules- | sed -n "s/^linux-modules-\([0-9][^-]*-$1\)\$/\1/p" | sort -V)
    kernel=$(grep "^${series//./\\.}\.[0-9].*+deb13" <<<"$versions" | tail -n 1 || true)
    [[ -n $kernel ]] || kernel=$(grep "^${series//./\\.}\." <<<"$versions" | tail -n 1 || true)
    if [[ -z $kernel ]]; then
        kernel=$(grep '+deb13' <<<"$versions" | tail -n 1)
        say "there is no $series kernel $1 any more: taking $kernel"
    fi
    say "guest kernel: $kernel"
}

# make_initramfs ROOT MODULES FILE: makes the initramfs FILE of ROOT's busybox and the modules of $kernel below MODULES that a guest needs to
# mount its root, in the order of insertion.
make_initramfs() {
    local out=$partial/initramfs.d module path
    mkdir -p "$out"/{bin,dev,proc,sys,root,modules}
    cp "$1/usr/bin/busybox" "$out/bin/"
    for module in virtio_pci virtio_blk virtio_console erofs fuse virtiofs; do
        modprobe -d "$2" -S "$kernel" --show-depends "$module"
    done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' >"$out/list"
    while read -r path; do
        module=$(basename "$path")
        module=${module%%.ko*}.ko
        case $path in
            *.xz) xz -dc "$path" ;;
            *.zst) zstd -qdc "$path" ;;
            *) cat "$path" ;;
        esac >"$out/modules/$module"
        printf '%s\n' "$module"
    done <"$out/list" >"$out/modules/order"
    rm "$out/list"
    (cd "$out" && find . | cpio --quiet -o -H newc) >"$3"
    rm -rf "$out"
}

# unpack_packages LIST: fetches the packages of packages/LIST.list, with what the tree lacks for them, and unpacks them into
# $partial/root, without documents. They are not installed.
unpack_packages() {
    local apt=$partial/apt package tree
    tree=$(tree_dir)
    [[ -d $tree ]] || die "there is no guest tree yet: run $here/setup.sh tree"
    logged "read package lists" private_apt "$apt"
    debian_preferences >"$apt/preferences.d/thruway"
    # What the tree has is not fetched again.
    cp "$tree/root/var/lib/dpkg/status" "$apt/status"
    export APT_CONFIG=$apt/apt.conf
    # shellcheck disable=SC2046  # a list
    logged "fetch $1" apt-get --quiet --yes --no-install-recommends --download-only install $(package_list "$1")
    unset APT_CONFIG
    mkdir "$partial/root"
    for package in "$apt"/cache/archives/*.deb; do dpkg-deb -x "$package" "$partial/root"; done
    rm -rf "$apt" "$partial"/root/usr/share/{doc,man,locale}
}

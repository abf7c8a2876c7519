#!/bin/bash
# Installs the host's packages and builds what guests need into the cache. Run it as root; without arguments it builds all.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

usage() {
    cat >&2 <<'END'
usage: setup.sh [--missing] [PART]...
  packages      host packages for the demo (packages/host.list)
  test-packages these and those of the tests (packages/test.list)
  cross-packages these and the compiler for arm64 (packages/cross.list), on x86-64
  tree          the Debian tree that guests boot from
  tools         the test suites and virtiofsd
  uml-smp       User-Mode Linux for several CPUs
  guest-kernel  Linux with the patches of guest-kernel
  old-kernel    the stock kernels of Debian 13 and 12
  programs      databases for a soak, and not built unless it is named
  callers       libvirt and virtme-ng, and not built unless it is named
  arm64         an arm64 guest, and not built unless it is named
  distributed   GlusterFS, NFS, bindfs and fuse2fs, for the cases of that name, and not built unless it is named
--missing builds nothing: it names the parts that are not in the cache, and how long they take on two CPUs.
Every part installs the packages that it needs.
END
    exit 1
}

all=(tree tools uml-smp guest-kernel old-kernel)
times=$here/../tests/times
directory() {
    case $1 in
        tree) tree_dir ;;
        tools) tools_dir ;;
        uml-smp) uml_smp_dir ;;
        guest-kernel) guest_kernel_dir x86_64 ;;
        old-kernel) old_kernel_dir ;;
    esac
}

missing=''
if [[ ${1-} == --missing ]]; then
    missing=yes
    shift
fi
parts=("$@")
((${#parts[@]})) || parts=("${all[@]}")
for part in "${parts[@]}"; do
    [[ " packages test-packages cross-packages programs callers arm64 distributed ${all[*]} " == *" $part "* ]] || usage
done

if [[ $missing ]]; then
    absent=()
    for part in "${parts[@]}"; do
        [[ " ${all[*]} " != *" $part "* || -d $(directory "$part") ]] || absent+=("$part")
    done
    ((!${#absent[@]})) || printf '%s (%s min)\n' "${absent[*]}" "$((($("$times" of "${absent[@]}") + 59) / 60))"
    exit 0
fi
((EUID == 0)) || die "must run as root"

mapfile -t packages < <(package_list host)
# The tree alone needs no packages of the tests.
for part in "${parts[@]}"; do
    [[ $part == tree || $part == packages ]] || { mapfile -t -O "${#packages[@]}" packages < <(package_list test) && break; }
done
if [[ " ${parts[*]} " == *" cross-packages "* && $(uname -m) == x86_64 ]]; then
    mapfile -t -O "${#packages[@]}" packages < <(package_list cross)
fi
# The crate's edition needs this version.
cargo_needed=1.85
if ! command -v cargo >/dev/null; then
    packages+=(cargo)
fi

install_packages() {
    local installed missing candidate
    # shellcheck disable=SC2016  # dpkg-query's own variables
    installed=$(dpkg-query -W -f '${db:Status-Abbrev} ${Package}\n' "${packages[@]}" 2>/dev/null | sed -n 's/^ii  *//p' || true)
    mapfile -t missing < <(printf '%s\n' "${packages[@]}" | grep -vxF -f <(printf '%s\n' "$installed") || true)
    ((${#missing[@]})) || return 0
    logged "update the host's package lists" apt-get --option "Acquire::Retries=$apt_tries" update
    if [[ " ${missing[*]} " == *" cargo "* ]]; then
        candidate=$(apt-cache policy cargo | sed -n 's/^  Candidate: //p')
        dpkg --compare-versions "$candidate" ge "$cargo_needed" ||
            die "Debian's cargo is older than $cargo_needed: install Rust with rustup (rustup toolchain install stable), then run this again"
    fi
    DEBIAN_FRONTEND=noninteractive logged "install ${#missing[@]} host packages" \
        apt-get install --option "Acquire::Retries=$apt_tries" --yes --no-install-recommends "${missing[@]}"
}

# One at a time: apt has a lock of its own, but does not wait for it.
mkdir -p "$cache"
exec 8>"$cache/packages.lock"
flock 8
install_packages
exec 8>&-

for part in "${parts[@]}"; do
    case $part in
        packages | test-packages | cross-packages) ;;
        guest-kernel) "$times" run "$part" "$guest_kernel/build" ;;
        *) "$times" run "$part" "$here/build-$part" ;;
    esac
done

# shellcheck shell=bash
# Functions for scripts that build a kernel. Source lib.sh first.

# The patches of guest-kernel apply to this version.
linux_series=7.2

# linux_source DIRECTORY PATCH...: unpacks Debian's kernel source there and applies the patches.
linux_source() {
    local apt=$1.apt package=linux-source-$linux_series
    logged "read package lists" private_apt "$apt"
    (cd "$apt" && APT_CONFIG=$apt/apt.conf logged "fetch $package" apt-get --quiet download "$package/trixie-backports") ||
        (cd "$apt" && APT_CONFIG=$apt/apt.conf logged "fetch $package from sid" apt-get --quiet download "$package")
    dpkg-deb -x "$apt"/linux-source-*.deb "$apt"
    mkdir "$1"
    logged "unpack $package" tar -xf "$apt/usr/src/$package.tar.xz" -C "$1" --strip-components=1
    rm -rf "$apt"
    logged "apply $(($# - 1)) patches" apply_patches "$@"
}

apply_patches() {
    local directory=$1 patch
    shift
    for patch in "$@"; do
        # Debian's source may be a newer stable release than the patches' base: offsets are fine, fuzz is not.
        patch -d "$directory" -p1 --fuzz=0 --batch <"$patch"
    done
}

# configure_linux SOURCE CONFIGURATION...: applies the configurations to allnoconfig. The last line for an option counts.
configure_linux() {
    local source=$1 option line
    shift
    cat "$@" >"$source/thruway.config"
    (cd "$source" && logged "configure the kernel" make KCONFIG_ALLCONFIG=thruway.config allnoconfig)
    while read -r option; do
        line=$(grep "^$option=" "$source/thruway.config" | tail -n 1)
        grep -qxF "$line" "$source/.config" || die "the kernel's configuration did not take $line"
    done < <(grep -o '^CONFIG_[A-Z0-9_]*' "$source/thruway.config" | sort -u)
}

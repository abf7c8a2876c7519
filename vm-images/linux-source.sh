# shellcheck shell=bash
# Functions for scripts that build a kernel. Source lib.sh first.

# The patches of guest-kernel apply to this version.
linux_series=7.2

# What no kernel of ours compiles. Without it the source takes half of the time and room.
linux_unused=('arch/[!ux]*/'{'*.[chS]','boot/dts/*/*'} 'drivers/'{accel,gpu,iio,media,'net/*',staging}'/*.[ch]' 'sound/*.[ch]'
    'Documentation/devicetree/*')

# build_kernel DIRECTORY FUNCTION: build_once for what is built from the kernel's source, which is unpacked once for all.
build_kernel() {
    [[ -d $1 ]] || build_once "$(linux_source_dir)" unpack_linux
    build_once "$1" "$2"
}

unpack_linux() {
    # shellcheck disable=SC2154  # build_once sets it
    local apt=$partial/apt package=linux-source-$linux_series
    logged "read package lists" private_apt "$apt"
    (cd "$apt" && APT_CONFIG=$apt/apt.conf logged "fetch $package" apt-get --quiet download "$package/trixie-backports") ||
        (cd "$apt" && APT_CONFIG=$apt/apt.conf logged "fetch $package from sid" apt-get --quiet download "$package")
    dpkg-deb -x "$apt"/linux-source-*.deb "$apt"
    mkdir "$partial/source"
    logged "unpack $package" tar -xf "$apt/usr/src/$package.tar.xz" -C "$partial/source" --strip-components=1 \
        "${linux_unused[@]/#/--exclude=linux-*/}"
    rm -rf "$apt"
}

# linux_source DIRECTORY PATCH...: makes a copy of the source there and applies the patches. The files are links to those of the cache:
# patch(1) writes a new file, and make(1) none that was there.
linux_source() {
    logged "copy the kernel source" cp -al "$(linux_source_dir)/source" "$1"
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

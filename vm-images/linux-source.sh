# shellcheck shell=bash
# Sourced, after lib.sh, by what builds a kernel.

# The kernel that is built here, and that guest-kernel/patches apply to.
linux_series=7.2

# linux_source DIRECTORY: Debian's source of that kernel, unpacked there.
linux_source() {
    local apt=$1.apt package=linux-source-$linux_series
    logged "read package lists" private_apt "$apt"
    (cd "$apt" && APT_CONFIG=$apt/apt.conf logged "fetch $package" apt-get --quiet download "$package/trixie-backports") ||
        (cd "$apt" && APT_CONFIG=$apt/apt.conf logged "fetch $package from sid" apt-get --quiet download "$package")
    dpkg-deb -x "$apt"/linux-source-*.deb "$apt"
    mkdir "$1"
    logged "unpack $package" tar -xf "$apt/usr/src/$package.tar.xz" -C "$1" --strip-components=1
    rm -rf "$apt"
}

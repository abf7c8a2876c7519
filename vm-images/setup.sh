#!/bin/bash
# Installs what the host lacks and builds into the cache what guests need: all of it, or the parts named.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

parts=("$@")
((${#parts[@]})) || parts=(tools tree uml-smp)
for part in "${parts[@]}"; do
    [[ $part =~ ^(tools|tree|uml-smp)$ ]] || die "usage: ${0##*/} [tools] [tree] [uml-smp]"
done
((EUID == 0)) || die "must run as root"

mapfile -t packages < <(package_list host)
# The project's own Rust edition needs this one.
cargo_needed=1.85
if ! command -v cargo >/dev/null; then
    packages+=(cargo)
fi
# shellcheck disable=SC2016  # dpkg-query's own variables
installed=$(dpkg-query -W -f '${db:Status-Abbrev} ${Package}\n' "${packages[@]}" 2>/dev/null | sed -n 's/^ii  *//p' || true)
mapfile -t missing < <(printf '%s\n' "${packages[@]}" | grep -vxF -f <(printf '%s\n' "$installed") || true)
if ((${#missing[@]})); then
    logged "update the host's package lists" apt-get update
    if [[ " ${missing[*]} " == *" cargo "* ]]; then
        candidate=$(apt-cache policy cargo | sed -n 's/^  Candidate: //p')
        dpkg --compare-versions "$candidate" ge "$cargo_needed" ||
            die "no cargo >= $cargo_needed here: install Rust by rustup (rustup toolchain install stable) and run this again"
    fi
    DEBIAN_FRONTEND=noninteractive logged "install ${#missing[@]} host packages" \
        apt-get install --yes --no-install-recommends "${missing[@]}"
fi

for part in "${parts[@]}"; do
    "$here/build-$part"
done

# shellcheck shell=bash disable=SC2154  # lib.sh sets them
# The demo, the commands that it prints, and the examples.

# type_into SCRIPT LINE...: runs a script that starts a guest with a shell, and types the lines there.
type_into() {
    local pid
    rm -f "$work/keys"
    mkfifo "$work/keys"
    # Otherwise the previous guest's prompt could be taken for this one's.
    : >"$work/console"
    # 120 s: a boot to a shell, under emulation on a busy machine.
    timeout 120 bash "$1" <"$work/keys" >"$work/console" 2>&1 &
    pid=$!
    exec 7>"$work/keys"
    wait_line "$work/console" 'guest#' 120 "$pid"
    printf '%s\n' "${@:2}" exit >&7
    exec 7>&-
    wait "$pid" || fail "$1 failed: $(cat "$work/console")"
}

case_demo() {
    local pid share=/tmp/thruway-demo/share
    "$root/tests/demo" | tee "$work/out"
    [[ -s $share/from-the-guest.txt ]] || fail 'the guest wrote nothing'

    sed -n '/^  .*thruwayd \\/,/--socket-path/p' "$work/out" | sed '1s/^/exec/' >"$work/daemon.sh"
    sed -n 's/^  \(bash .*\)/exec \1/p' "$work/out" >"$work/guest.sh"
    sed 1d /tmp/thruway-demo/guest.sh >"$work/qemu.sh"
    bash "$work/daemon.sh" &
    pid=$!
    type_into "$work/guest.sh" "$(sed -n 's/^  \(mount -t virtiofs .*\)/\1/p' "$work/out")" 'echo by-hand >/mnt/by-hand'
    [[ $(cat "$share/by-hand") == by-hand ]] || fail "the printed commands do not work: $(cat "$work/console")"
    wait "$pid" || fail "the daemon ended with status $?"

    examples "$share"
}

# examples SHARE: the QEMU script in the demo's guest, and the other files where their checkers are installed.
examples() {
    local schema=/usr/share/libvirt/schemas/domain.rng
    # The first two lines of the demo's command are its QEMU, the next three the machine that the script sets up.
    {
        printf 'QEMU="%s" ' "$(sed -n 1,2p "$work/qemu.sh" | tr -d '\\\n' | tr -s ' ')"
        printf 'THRUWAYD=%q MEMORY=512M exec %q %q ' "$THRUWAY_DAEMON" "$root/examples/qemu" "$1"
        sed -n '3p;6,$p' "$work/qemu.sh"
    } >"$work/example.sh"
    type_into "$work/example.sh" 'mount -t virtiofs share /mnt' 'echo by-example >/mnt/by-example'
    [[ $(cat "$1/by-example") == by-example ]] || fail "examples/qemu does not work: $(cat "$work/console")"

    if command -v xmllint >/dev/null && [[ -f $schema ]]; then
        xmllint --noout --relaxng "$schema" "$root/examples/libvirt.xml" || fail 'examples/libvirt.xml is not valid'
    else
        note "libvirt's schema or xmllint is not installed: examples/libvirt.xml is not checked"
    fi
}

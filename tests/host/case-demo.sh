# shellcheck shell=bash disable=SC2154  # lib.sh sets them
# The demo, and what it says of starting it by hand.

case_demo() {
    local pid
    "$root/tests/demo" | tee "$work/out"
    [[ -s /tmp/thruway-demo/share/from-the-guest.txt ]] || fail 'the guest wrote nothing'
    sed -n 's/^  \(.*thruwayd --socket-path .*\)/exec \1/p' "$work/out" >"$work/daemon.sh"
    sed -n '/^  .*ld-linux/,/-append/p' "$work/out" >"$work/qemu.sh"
    sed -n 's/^  \(mount -t virtiofs .*\)/\1/p' "$work/out" >"$work/typed"
    bash "$work/daemon.sh" &
    pid=$!
    mkfifo "$work/keys"
    # 120 s: a boot to a shell, in emulation on a busy machine.
    timeout 120 bash "$work/qemu.sh" <"$work/keys" >"$work/console" 2>&1 &
    exec 7>"$work/keys"
    wait_line "$work/console" 'guest#' 120 "$!"
    { cat "$work/typed" && echo 'echo by-hand >/mnt/by-hand; exit'; } >&7
    wait "$!" || fail "QEMU: $(cat "$work/console")"
    [[ $(</tmp/thruway-demo/share/by-hand) == by-hand ]] || fail "by hand it does not work: $(cat "$work/console")"
    wait "$pid" || fail "the daemon ended with status $?"
}

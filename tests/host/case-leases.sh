# shellcheck shell=bash disable=SC2154  # lib.sh and case-passthrough.sh set them
# Leases: what a guest with the patches of guest-kernel keeps until the daemon notifies it.

# leases_case BOOT-ARGUMENT...: the host runs the commands that the guest sends.
leases_case() {
    local guest
    make_share share
    make_share meet
    mkdir -p "$work/sockets"
    start_daemon s "$work/share" --control-path "$work/sockets/s.control" --cache=auto --inode-file-handles=prefer
    start_daemon meet "$work/meet" --cache=never
    # shellcheck disable=SC2046  # a list
    "$boot" --log-dir "$work/leases.logs" --ro-dir "$guest_dir" --timeout 600 --no-mount "$@" \
        --fs "s=$work/sockets/s" --fs "meet=$work/sockets/meet" "$guest_dir/leases.py" $(pick '20 50' '50 100') &
    guest=$!
    answer_guest leases "$guest"
    # Not $!, which is the last command that the host has run.
    wait "$guest" || fail "the guest has failed"
    logs_are_clean "$work/leases.logs" && logs_are_clean "$work/daemons.logs"
}

case_leases_uml() {
    "$root/vm-images/setup.sh" uml-smp
    leases_case --kind uml-smp
}

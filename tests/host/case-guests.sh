# shellcheck shell=bash disable=SC2154  # lib.sh sets them
# Two guests on one directory, each by a daemon of its own.

# duo KIND CACHE WITHIN DAEMON-ARGUMENTS PART...
duo() {
    local kind=$1 cache=$2 within=$3 more pids=() role failed=''
    read -ra more <<<"$4"
    shift 4
    make_share share
    make_share meet
    for role in a b; do
        start_daemon "s@$role" "$work/share" --cache="$cache" "${more[@]}"
        start_daemon "meet@$role" "$work/meet" --cache=never
        # 5 minutes: a guest waits 2 for the other.
        "$boot" --kind "$kind" --log-dir "$work/$role.logs" --ro-dir "$guest_dir" --timeout 300 \
            --fs "s=$work/sockets/s@$role" --fs "meet=$work/sockets/meet@$role" \
            "$guest_dir/duo.py" "$role" "$within" "$@" &
        pids+=($!)
    done
    for role in "${pids[@]}"; do wait "$role" || failed=yes; done
    [[ -z $failed ]] || fail "the guests do not agree"
    logs_are_clean "$work/a.logs" && logs_are_clean "$work/b.logs" && logs_are_clean "$work/daemons.logs"
}

# With no cache a change is there at once, that is at the first look after the other guest has made it. With auto, the
# daemon says 1 s; one more is for a busy machine.
case_two_guests_cache_never() { duo uml never 0 --xattr changes appends; }
case_two_guests_cache_auto() { duo uml auto 2 --xattr changes appends; }
case_two_guests_qemu() { duo qemu never 0 '--xattr --posix-lock --flock' changes appends locks; }
case_two_guests_locks() { duo uml auto 2 '--posix-lock --flock' locks; }

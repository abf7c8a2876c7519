# shellcheck shell=bash disable=SC2154  # lib.sh sets them
# Two guests on one directory, each with its own daemon.

# duo KIND CACHE WITHIN DAEMON-ARGUMENTS PART...: a change must be visible within WITHIN seconds.
duo() {
    local kind=$1 cache=$2 within=$3 more pids=() role failed=''
    read -ra more <<<"$4"
    shift 4
    make_share share
    make_share meet
    for role in a b; do
        start_daemon "s@$role" "$work/share" --cache="$cache" "${more[@]}"
        start_daemon "meet@$role" "$work/meet" --cache=never
        # 5 minutes: a guest waits 2 minutes for the other.
        "$boot" --kind "$kind" --log-dir "$work/$role.logs" --ro-dir "$guest_dir" --timeout 300 \
            --fs "s=$work/sockets/s@$role" --fs "meet=$work/sockets/meet@$role" \
            "$guest_dir/duo.py" "$role" "$within" "$@" &
        pids+=($!)
    done
    for role in "${pids[@]}"; do wait "$role" || failed=yes; done
    [[ -z $failed ]] || fail "the guests do not agree"
    logs_are_clean "$work/a.logs" && logs_are_clean "$work/b.logs" && logs_are_clean "$work/daemons.logs"
}

# Without a cache the next look after a change must see it. With auto, attributes are valid for 1 s; one more second is for a
# busy machine.
case_two_guests_cache_never() { duo uml never 0 --xattr changes appends; }
case_two_guests_cache_auto() { duo uml auto 2 --xattr changes appends; }
case_two_guests_qemu() { duo qemu never 0 '--xattr --posix-lock --flock' changes appends locks; }
case_two_guests_locks() { duo uml auto 2 '--posix-lock --flock' locks; }

# shellcheck shell=bash disable=SC2154  # lib.sh sets them
# What a guest sees, and when, in each cache mode: the promises of docs/caching.md.

# caching MODE DAEMON-ARGUMENT...: two guests on one directory, each with its own daemon. Guest a looks.
caching() {
    local mode=$1 role pids=() tags
    shift
    make_share share
    make_share meet
    # The host answers guest a's questions about its daemon.
    mkdir -p "$work/sockets"
    for role in a b; do
        start_daemon "s@$role" "$work/share" --metrics-path "$work/sockets/s@$role.metrics" "$@"
        start_daemon "meet@$role" "$work/meet" --cache=never
        tags=(--fs "s=$work/sockets/s@$role" --fs "meet=$work/sockets/meet@$role")
        if [[ $mode$role == negativea ]]; then
            start_daemon n@a "$work/share" --negative-timeout=1
            tags+=(--fs "n=$work/sockets/n@a")
        fi
        # 5 minutes: a guest waits 2 minutes for the other, or for what it is promised to see.
        "$boot" --log-dir "$work/$role.logs" --ro-dir "$guest_dir" --timeout 300 --no-mount "${tags[@]}" \
            "$guest_dir/caching.py" "$role" "$mode" &
        pids+=($!)
    done
    answer_guest a "${pids[0]}"
    # If a has failed, b waits for it in vain.
    for role in "${pids[@]}"; do wait "$role" || fail "a guest has failed"; done
    logs_are_clean "$work/a.logs" && logs_are_clean "$work/b.logs" && logs_are_clean "$work/daemons.logs"
}

case_caching_never() { caching never --cache=never; }
case_caching_auto() { caching auto --cache=auto; }
case_caching_metadata() { caching metadata --cache=metadata; }
case_caching_always() { caching always --cache=always; }
case_caching_writeback() { caching writeback --cache=auto --writeback; }
case_caching_no_open() { caching no-open --cache=auto --no-open=always; }
case_caching_negative() { caching negative --cache=auto --negative-timeout=86400; }

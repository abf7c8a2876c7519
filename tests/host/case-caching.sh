# shellcheck shell=bash disable=SC2154  # lib.sh sets them
# What a guest sees, and when, in each cache mode: the promises of docs/caching.md.

# Of guest a's kernel. The processes of its programs wait for it.
stop_guest() { kill -STOP "$(<"$work/a.pid")"; }
continue_guest() { kill -CONT "$(<"$work/a.pid")"; }

# caching MODE DAEMON-ARGUMENT...: two guests on one directory, each with its own daemon. Guest a looks.
caching() {
    local mode=$1 role pids=() tags
    shift
    make_share share
    make_share meet
    # The host answers guest a's questions about its daemon.
    mkdir -p "$work/sockets"
    for role in a b; do
        start_daemon "s@$role" "$work/share" --control-path "$work/sockets/s@$role.control" "$@"
        start_daemon "meet@$role" "$work/meet" --cache=never
        tags=(--fs "s=$work/sockets/s@$role" --fs "meet=$work/sockets/meet@$role")
        case $mode$role in
            negativea) start_daemon n@a "$work/share" --negative-timeout=1 ;;
            agenta) start_daemon n@a "$work/share" --lease-timeout=2 ;;
        esac
        [[ $role == b || ! -S $work/sockets/n@a ]] || tags+=(--fs "n=$work/sockets/n@a")
        # 10 minutes: a guest waits 2 minutes for the other, or for what it is promised to see, and 5 for 50,000 changes.
        "$boot" --kind uml --pid-file "$work/$role.pid" --log-dir "$work/$role.logs" --ro-dir "$guest_dir" --timeout 600 --no-mount "${tags[@]}" \
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

# Files whose size says nothing.
case_caching_proc() {
    local mode number=0
    make_share share
    mkdir "$work/share/proc"
    mount -t proc proc "$work/share/proc"
    for mode in auto metadata 'auto --writeback' 'always --no-open=never'; do
        guest "proc$((++number))" --kind uml --share "s=$work/share" --daemon-args "--cache=$mode" /bin/grep -q btime /mnt/s/proc/stat
    done
}

# shellcheck shell=bash disable=SC2154  # case-passthrough.sh has passthrough and its settings
# The guest's half of the notification queue, against a device that sends every kind of notification (notifier.py).

# notifications_case BOOT-ARGUMENT...
notifications_case() {
    make_share n
    guest notifications "$@" --daemon "python3 $root/tests/host/notifier.py" --share "n=$work/n" "$guest_dir/notifications.py"
}

case_notifications_uml() {
    "$root/vm-images/setup.sh" uml-smp
    notifications_case --kind uml-smp
}

case_notifications_qemu() {
    passthrough
    notifications_case --kind qemu --dax "${window_boot[@]}"
}

# inotify_case SCRIPT GUESTS BOOT-ARGUMENT...: with $files changed files, boots guests on one directory, each with its own daemon. Guest a has the host change it.
inotify_case() {
    local script=$1 guests=$2 role pids=()
    shift 2
    make_share share
    make_share meet
    mkdir "$work/share"/{d,e,many,old,new}
    echo content >"$work/share/f"
    : >"$work/share/log"
    for role in $guests; do
        start_daemon "s@$role" "$work/share"
        start_daemon "meet@$role" "$work/meet" --cache=never
        # 600 s: the emulated guest takes a minute or two.
        "$boot" --log-dir "$work/$role.logs" --ro-dir "$guest_dir" --timeout 600 --no-mount "$@" \
            --fs "s=$work/sockets/s@$role" --fs "meet=$work/sockets/meet@$role" "$guest_dir/$script" "$role" "$files" &
        pids+=($!)
    done
    answer_guest a "${pids[0]}"
    # If a has failed, b waits for it in vain.
    for role in "${pids[@]}"; do wait "$role" || fail "a guest missed events"; done
    for role in $guests; do logs_are_clean "$work/$role.logs"; done
    logs_are_clean "$work/daemons.logs"
}

case_inotify_uml() {
    "$root/vm-images/setup.sh" uml-smp
    local files=1000
    inotify_case inotify.py "a b" --kind uml-smp
}

case_inotify_qemu() {
    passthrough
    local files
    # Emulation makes it slow.
    files=$(pick 200 1000)
    inotify_case inotify.py "a b" --kind qemu --dax "${window_boot[@]}"
}

# Programs that people use to watch files.
case_inotify_programs() {
    "$root/vm-images/setup.sh" uml-smp
    local files=0
    # Node needs more memory than other guests have.
    inotify_case watchers.py a --kind uml-smp --mem 1024
}

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

# inotify_case BOOT-ARGUMENT...: does the steps that tests/guest/inotify.py asks for, on the host.
inotify_case() {
    local share=$work/share step=0 start pid command commands
    make_share share
    mkdir "$share/d" "$share/e" "$share/many"
    echo content >"$share/f"
    : >"$share/log"
    start_daemon s "$share"
    : >"$work/out"
    guest inotify "$@" --fs "s=$work/sockets/s" "$guest_dir/inotify.py" >"$work/out" 2>&1 &
    pid=$!
    commands=('echo 1 >d/a' 'chmod 600 d/a' 'mv d/a e/b' 'mkdir d/sub' 'rmdir d/sub' 'mkdir d/sentinel' 'echo 2 >>f' 'rm f')
    for ((start = 0; start < 10000; start += 1000)); do
        commands+=("for ((i = $start; i < $start + 1000; i++)); do : >many/\$i; done")
    done
    commands+=('echo first >>log' 'echo second >>log' 'mv log old; echo third >log')
    for command in "${commands[@]}"; do
        step=$((step + 1))
        # 120 s: the guest boots in this time too.
        wait_line "$work/out" "^step $step\$" 120 "$pid"
        (cd "$share" && eval "$command")
    done
    wait "$pid" || { cat "$work/out" && fail "the guest missed events"; }
    cat "$work/out"
}

case_inotify_uml() {
    "$root/vm-images/setup.sh" uml-smp
    inotify_case --kind uml-smp
}

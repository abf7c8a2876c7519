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

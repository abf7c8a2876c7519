# shellcheck shell=bash disable=SC2154  # lib.sh sets them
# Single system calls and their results, in both kinds of guest and with every kind of daemon.

# Options that allow every test.
everything=(--posix-acl --allow-direct-io --killpriv-v2 --posix-lock --flock)
functional_boot=()
# The suite's tests to run; all if there are none.
functional_tests=()

# functional KIND DAEMON-ARGUMENT...: runs the suite and compares checksums on the host.
functional() {
    local kind=$1
    shift
    make_share share
    guest functional --kind "$kind" "${functional_boot[@]}" --share "s=$work/share" --daemon-args "${everything[*]} $*" \
        "$guest_dir/functional.py" /mnt/s "${functional_tests[@]}"
    (cd "$work/share/kept" && sha256sum --quiet -c SHA256SUMS) || fail "the host sees other contents"
}

case_functional_uml() { functional uml; }
case_functional_qemu() { functional qemu; }
case_functional_no_file_handles() { functional uml --inode-file-handles=never; }
case_functional_file_handles() { functional uml --inode-file-handles=mandatory; }
case_functional_chroot() { functional uml --sandbox chroot; }
case_functional_no_sandbox() { functional uml --sandbox none; }
case_functional_cache_never() { functional uml --cache=never --allow-mmap; }
case_functional_cache_always() { functional uml --cache=always; }
# Locks on the host need handles.
functional_no_open() {
    local everything=(--posix-acl --allow-direct-io --no-open=always)
    functional uml "$@"
}
case_functional_no_open() { functional_no_open --cache=always; }
case_functional_no_open_cache_auto() { functional_no_open --cache=auto; }
case_functional_no_open_writeback() { functional_no_open --cache=always --writeback; }
case_functional_cache_metadata() { functional uml --cache=metadata --allow-mmap; }
case_functional_writeback() { functional uml --writeback; }
case_functional_no_readdirplus() { functional uml --no-readdirplus; }

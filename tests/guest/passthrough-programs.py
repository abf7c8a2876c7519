#!/usr/bin/python3
"""Programs work on passed-through files: passthrough-programs.py [STEP]... The shares xfs and btrfs have file systems of these
kinds, if the host has them."""

import ctypes
import hashlib
import os
import subprocess
import sys

import lmdb

sys.path.insert(0, "/host")
from rings import address
from window import *

# What a step on a passed-through file is compared with.
LOCAL = "/tmp"


def run(*command, cwd=S, said=None, **options):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{' '.join(command)[:100]}: status {done.returncode}: {done.stderr[-300:]}"
    if said is not None:
        equal(done.stdout.strip(), said)
    return done.stdout


# A write-ahead log; the database is read through a mapping.
SETTINGS = "PRAGMA busy_timeout=60000; PRAGMA journal_mode=wal; PRAGMA mmap_size=268435456;"
ROWS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 5000)"


def sql(text):
    return run("sqlite3", "db", input=SETTINGS + text).split("\n")[3:]


def sqlite():
    sql("CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT, c INTEGER); CREATE INDEX x ON t(b);")
    sql(f"INSERT INTO t {ROWS} SELECT i, hex(randomblob(50)), i * i FROM n;")
    # Two writers and one reader at the same time.
    others = [
        subprocess.Popen(
            ["sqlite3", "db"], cwd=S, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(3)
    ]
    for number, other in enumerate(others):
        work = [
            f"INSERT INTO t(b, c) VALUES(hex(randomblob(40)), {n}); UPDATE t SET c = c + 1 WHERE a = {number};"
            if number < 2
            else "SELECT sum(length(b)) FROM t;"
            for n in range(100)
        ]
        other.stdin.write(SETTINGS + "\n".join(work))
        other.stdin.close()
    for other in others:
        said = other.stdout.read()
        assert other.wait() == 0 and "rror" not in said, f"sqlite3: {said[-300:]}"
    sql("DELETE FROM t WHERE a % 3 = 0; PRAGMA wal_checkpoint(TRUNCATE);")
    # Two thirds of 5,000 and 2 × 100 rows.
    equal(sql("SELECT count(*), sum(a <= 5000) FROM t;")[0], "3467|3334")
    sql("VACUUM;")
    equal(sql("PRAGMA integrity_check;")[0], "ok")
    drop_caches()
    equal(sql("PRAGMA integrity_check;")[0], "ok")


SOURCES = 20


def project(directory):
    os.mkdir(directory)
    for number in range(SOURCES):
        write(
            f"{directory}/f{number}.c",
            f'#include "all.h"\n#include <stdio.h>\nint f{number}(int x) {{ return x + {number}; }}\n'.encode()
            + b"".join(b"static const char *t%d = \"%s\";\n" % (n, b"x" * 90) for n in range(40))
            + f"const char *g{number}(void) {{ return t{number % 40}; }}\n".encode(),
        )
    write(f"{directory}/all.h", "".join(f"int f{n}(int x);\n" for n in range(SOURCES)).encode())
    calls = " + ".join(f"f{n}(1)" for n in range(SOURCES))
    write(
        f"{directory}/main.c",
        f'#include "all.h"\n#include <stdio.h>\nint main(void) {{ printf("%d\\n", {calls}); return 0; }}\n'.encode(),
    )
    objects = " ".join(f"f{n}.o" for n in range(SOURCES))
    write(
        f"{directory}/Makefile",
        f"prog: main.o {objects}\n\t$(CC) -o $@ $^\n%.o: %.c all.h\n\t$(CC) -g -c -o $@ $<\n".encode(),
    )


SUM = str(SOURCES + SOURCES * (SOURCES - 1) // 2)
GIT = ("git", "-c", "user.name=n", "-c", "user.email=e@x", "-c", "safe.directory=*", "-c", "protocol.file.allow=always")


def git():
    project(f"{S}/project")
    repository = f"{S}/project"
    write(f"{repository}/large", os.urandom(3 << 20))
    run(*GIT, "init", "-q", cwd=repository)
    for number in range(3):
        write(f"{repository}/changed", b"%d" % number)
        run(*GIT, "add", "-A", cwd=repository)
        run(*GIT, "commit", "-qm", f"commit {number}", cwd=repository)
    run(*GIT, "gc", "-q", cwd=repository)
    run(*GIT, "clone", "-q", "--no-local", "project", "clone")
    run(*GIT, "fsck", "--full", "--strict", cwd=f"{S}/clone")
    run(*GIT, "status", "--porcelain", cwd=f"{S}/clone", said="")
    equal(read(f"{S}/clone/large"), read(f"{repository}/large"))


def gcc():
    """Builds what was cloned. The host runs it too."""
    run("make", "-j2", cwd=f"{S}/clone")
    run("./prog", cwd=f"{S}/clone", said=SUM)
    drop_caches()
    run("./prog", cwd=f"{S}/clone", said=SUM)
    equal(host_number("cd clone && ./prog"), int(SUM))
    # Overwrite a file that was executed.
    os.utime(f"{S}/clone/all.h")
    run("make", cwd=f"{S}/clone")
    run("./prog", cwd=f"{S}/clone", said=SUM)


def together(*functions):
    """Runs each function in a process of its own. All must succeed."""
    pids = []
    for function in functions:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            # 120 s: many times what they need in an emulated guest on a busy machine.
            signal.alarm(120)
            try:
                function()
            except BaseException:
                traceback.print_exc(file=sys.stdout)
                sys.stdout.flush()
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    # A signal is negative: glibc ends a process by SIGABRT if a futex fails.
    equal(ends, [0] * len(functions))


# pthread.h and futex.h: a mutex has 40 bytes, a condition 48.
PTHREAD_PROCESS_SHARED = PTHREAD_MUTEX_ROBUST = 1
EOWNERDEAD = 130
SYS_FUTEX, FUTEX_WAIT, FUTEX_WAKE = 202, 0, 1
MUTEX, CONDITION, TURN, COUNT, WORD = 0, 64, 128, 132, 136


def pthread(name, *arguments):
    """The pthread functions return an error number."""
    return getattr(libc, f"pthread_{name}")(*map(ctypes.c_void_p, arguments))


def word(view, at):
    return ctypes.c_uint.from_buffer(view, at)


def mutexes(directory):
    """Two processes share a mutex, a condition and a futex. Each has the file at an address of its own."""
    path = f"{directory}/mutex"
    write(path, bytes(1 << 20))
    turns = 200

    def set_up():
        with mapped(path, 4096, writable=True) as view:
            at, attributes = address(view), ctypes.create_string_buffer(64)
            pthread("mutexattr_init", ctypes.addressof(attributes))
            pthread("mutexattr_setpshared", ctypes.addressof(attributes), PTHREAD_PROCESS_SHARED)
            pthread("mutexattr_setrobust", ctypes.addressof(attributes), PTHREAD_MUTEX_ROBUST)
            equal(pthread("mutex_init", at + MUTEX, ctypes.addressof(attributes)), 0)
            pthread("condattr_init", ctypes.addressof(attributes))
            pthread("condattr_setpshared", ctypes.addressof(attributes), PTHREAD_PROCESS_SHARED)
            equal(pthread("cond_init", at + CONDITION, ctypes.addressof(attributes)), 0)

    def player(mine, padding):
        def play():
            # Another mapping before it moves this one.
            spare = mmap.mmap(-1, padding)
            with mapped(path, 4096, writable=True) as view:
                at = address(view)
                for _ in range(turns):
                    equal(pthread("mutex_lock", at + MUTEX), 0)
                    while word(view, TURN).value != mine:
                        equal(pthread("cond_wait", at + CONDITION, at + MUTEX), 0)
                    word(view, TURN).value = 1 - mine
                    word(view, COUNT).value += 1
                    equal(pthread("cond_broadcast", at + CONDITION), 0)
                    equal(pthread("mutex_unlock", at + MUTEX), 0)
            spare.close()

        return play

    def waits():
        with mapped(path, 4096, writable=True) as view:
            while word(view, WORD).value == 0:
                # EAGAIN if the value has changed before.
                if libc.syscall(SYS_FUTEX, ctypes.c_void_p(address(view, WORD)), FUTEX_WAIT, 0, None, None, 0) < 0:
                    equal(ctypes.get_errno(), errno.EAGAIN)

    def wakes():
        with mapped(path, 4096, writable=True) as view:
            word(view, WORD).value = 1
            call("syscall", SYS_FUTEX, ctypes.c_void_p(address(view, WORD)), FUTEX_WAKE, 1, None, None, 0)

    def dies():
        with mapped(path, 4096, writable=True) as view:
            equal(pthread("mutex_lock", address(view, MUTEX)), 0)
            os._exit(0)

    set_up()
    together(player(0, 1 << 16), player(1, 1 << 22))
    with mapped(path, 4096, writable=True) as view:
        equal(word(view, COUNT).value, 2 * turns)
    together(waits, wakes)
    together(dies)
    with mapped(path, 4096, writable=True) as view:
        equal(pthread("mutex_lock", address(view, MUTEX)), EOWNERDEAD)
        pthread("mutex_consistent", address(view, MUTEX))
        equal(pthread("mutex_unlock", address(view, MUTEX)), 0)
    os.unlink(path)


def databases(directory, through_the_mapping):
    """LMDB: two processes write and a third one reads. Its locks are in a mapping; its pages too if it writes through the mapping."""
    path, transactions = f"{directory}/lmdb", 60

    def opened():
        return lmdb.open(path, map_size=32 << 20, writemap=through_the_mapping, sync=False)

    def writer(name):
        def put():
            with opened() as environment:
                for turn in range(transactions):
                    with environment.begin(write=True) as txn:
                        total = int(txn.get(b"total", b"0"))
                        for n in range(10):
                            txn.put(b"%s-%06d" % (name, turn * 10 + n), bytes([turn]) * 500)
                        txn.put(b"total", b"%d" % (total + 10))
                environment.sync(True)

        return put

    def reader():
        with opened() as environment:
            seen = 0
            while seen < 2 * 10 * transactions:
                with environment.begin() as txn:
                    total = int(txn.get(b"total", b"0"))
                    assert total >= seen, f"{total} entries after {seen}"
                    equal(txn.stat()["entries"], total + (total > 0))
                    seen = total

    together(writer(b"one"), writer(b"two"), reader)
    drop_caches()
    with opened() as environment, environment.begin() as txn:
        entries = dict(txn.cursor())
    due = {b"%s-%06d" % (w, n): bytes([n // 10]) * 500 for w in (b"one", b"two") for n in range(10 * transactions)}
    assert entries == {**due, b"total": b"%d" % len(due)}, "the database has other contents"
    run("rm", "-r", path)


def tree(directory):
    """Makes some directories with files of many sizes, links and modes."""
    os.mkdir(directory)
    for number, size in enumerate((0, 1, 4095, 4096, 70_000, 300_000, 1 << 20, 3_000_001)):
        os.mkdir(f"{directory}/{number}")
        write(f"{directory}/{number}/file", pattern(size, number))
        os.chmod(f"{directory}/{number}/file", 0o640 + number % 8)
        os.link(f"{directory}/{number}/file", f"{directory}/{number}/hard")
        os.symlink("file", f"{directory}/{number}/soft")
    # A file with a hole.
    with open(f"{directory}/sparse", "wb") as file:
        file.seek(1 << 20)
        file.write(b"end")


def the_same(one, other):
    run("diff", "-r", "--no-dereference", one, other)


def copies():
    """cp, tar and rsync, from and to passed-through files."""
    tree("/tmp/tree")
    run("cp", "-a", "--reflink=auto", "/tmp/tree", f"{S}/copied")
    the_same("/tmp/tree", f"{S}/copied")
    run("cp", "-a", "--reflink=auto", "copied", "again")
    run("sh", "-c", "mkdir unpacked && tar -C copied -c . | tar -C unpacked -x && tar -C unpacked -cf archive.tar . && tar -df archive.tar -C again")
    the_same("/tmp/tree", f"{S}/unpacked")
    run("rsync", "-aHS", "unpacked/", "synced/")
    the_same("/tmp/tree", f"{S}/synced")
    write(f"{S}/again/6/file", b"changed", flags=os.O_WRONLY)
    # In place, by differences.
    run("rsync", "-aH", "--inplace", "--no-whole-file", "--checksum", "again/", "synced/")
    the_same(f"{S}/again", f"{S}/synced")
    run("rsync", "-aH", "--checksum", "--itemize-changes", "again/", "synced/", said="")
    host("diff -r --no-dereference again synced")
    run("rm", "-r", "copied", "again", "unpacked", "synced", "archive.tar", "/tmp/tree")


def an_image(directory, *options):
    """A file system in a file: made, mounted by a loop device, filled, checked."""
    image, place = f"{directory}/image", "/tmp/place"
    write(image, b"")
    os.truncate(image, 48 << 20)
    os.makedirs(place, exist_ok=True)
    run("mkfs.ext4", "-q", image)
    tree("/tmp/tree")
    for turn in range(2):
        device = run("losetup", "--find", "--show", *options, image).strip()
        run("mount", device, place)
        if turn == 0:
            run("cp", "-a", "/tmp/tree", f"{place}/tree")
        the_same("/tmp/tree", f"{place}/tree")
        # Under the mounted file system.
        run("sh", "-c", "for n in $(seq 20); do head -c 200000 /dev/zero | tr '\\0' $n >f$n; done; sync; rm f1*", cwd=place)
        run("umount", place)
        run("losetup", "-d", device)
        run("e2fsck", "-f", "-n", image)
        drop_caches()
    if directory == S:
        # A loop device is let go of after losetup -d returns.
        host("e2fsck -f -n image")
    run("rm", "-r", image, "/tmp/tree")


def swap(directory):
    """The errno of swapon(2), and that the file is an ordinary one after it."""
    path = f"{directory}/swap"
    write(path, bytes(1 << 20))
    os.chmod(path, 0o600)
    run("mkswap", path)
    number = 0
    if libc.swapon(path.encode(), 0) < 0:
        number = ctypes.get_errno()
    else:
        call("swapoff", path.encode())
    with mapped(path, 1 << 20, writable=True) as view:
        view[5000:5005] = b"store"
    equal(read(path)[5000:5005], b"store")
    os.truncate(path, 0)
    os.unlink(path)
    return errno.errorcode.get(number, number)


def swap_refused():
    equal(swap(S), swap(LOCAL))


def stores(tag):
    """A store to a shared mapping of a file that is new, that has holes, and that grows."""
    if not os.path.isdir(f"/mnt/{tag}"):
        return
    data = bytearray(pattern(3 << 20))
    write(f"/mnt/{tag}/file", data)
    with open(f"/mnt/{tag}/sparse", "wb") as file:
        file.truncate(len(data))
    for name in "file", "sparse":
        path = f"/mnt/{tag}/{name}"
        due = bytearray(data if name == "file" else len(data))
        fd = os.open(path, os.O_RDWR)

        def store():
            with mapped(path, len(due), writable=True) as view:
                for at in range(100, len(due), 300_000):
                    view[at : at + 5] = b"store"

        # In a child, for a store may end its process by SIGBUS.
        in_child(store)
        for at in range(100, len(due), 300_000):
            due[at : at + 5] = b"store"
        assert read(path) == due, f"{name}: the stores are not in the file"
        os.pwrite(fd, b"in place", 4090)
        due[4090:4098] = b"in place"
        os.pwrite(fd, b"far", 30 << 20)
        due += bytes((30 << 20) - len(due)) + b"far"
        in_child(store)
        for at in range(100, len(due), 300_000):
            due[at : at + 5] = b"store"
        os.fsync(fd)
        os.close(fd)
        drop_caches()
        assert read(path) == due, f"{name}: other contents after it grew"
        equal(host(f"sha256sum <../{'share' if tag == 's' else tag}/{name}").split()[0], hashlib.sha256(due).hexdigest())
        os.unlink(path)


mount("meet")
mount("s")
for tag in "xfs", "btrfs":
    if host(f"test -S ../sockets/{tag} && echo yes || true").strip() == "yes":
        mount(tag)
parts = (
    (mutexes, LOCAL),
    (mutexes, S),
    (databases, S, False),
    (databases, S, True),
    (copies,),
    (an_image, S),
    (an_image, S, "--direct-io=on"),
    (swap_refused,),
    (stores, "s"),
    (stores, "xfs"),
    (stores, "btrfs"),
    (sqlite,),
    (git,),
    (gcc,),
)
steps(*[part for part in parts if not sys.argv[1:] or part[0].__name__ in sys.argv[1:]])
for tag in "xfs", "btrfs":
    if os.path.isdir(f"/mnt/{tag}"):
        umount(tag)
umount("s")
umount("meet")

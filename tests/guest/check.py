"""Functions that the guest's test suites share. Each test runs in its own process; the results are counted."""

import ctypes
import errno
import os
import shutil
import signal
import sys
import time
import traceback

tests = []
libc = ctypes.CDLL(None, use_errno=True)
AT_FDCWD = -100


class Skip(Exception):
    """This guest or the host's file system cannot do this."""


def test(function):
    tests.append(function)
    return function


def call(name, *arguments):
    """Calls a C function that returns -1 and sets errno on failure."""
    result = getattr(libc, name)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def renameat2(old, new, flags):
    call("renameat2", AT_FDCWD, os.fsencode(old), AT_FDCWD, os.fsencode(new), flags)


def refused(number, function, *arguments, **options):
    """Checks that the call fails with this errno."""
    try:
        function(*arguments, **options)
    except OSError as error:
        assert error.errno == number, f"errno {errno.errorcode[error.errno]}, expected {errno.errorcode[number]}"
        return
    raise AssertionError(f"no error, expected {errno.errorcode[number]}")


def equal(got, due):
    assert got == due, f"{str(got)[:200]}, expected {str(due)[:200]}"


def write(path, data, mode=0o644, flags=os.O_WRONLY | os.O_CREAT | os.O_TRUNC):
    fd = os.open(path, flags, mode)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
    finally:
        os.close(fd)


def read(path):
    with open(path, "rb", buffering=0) as file:
        return file.readall()


def pattern(size, seed=1):
    """Bytes in which no aligned group of 8 occurs twice."""
    import array

    return array.array("Q", range(seed << 40, (seed << 40) + (size + 7) // 8)).tobytes()[:size]


def in_child(function, *arguments):
    """Runs the function in another process and raises its exception here, as text."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        status = 0
        try:
            function(*arguments)
        except Skip as skip:
            os.write(writer, str(skip).encode())
            status = 2
        except BaseException as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = next(
                (f for f in reversed(traceback.extract_tb(error.__traceback__)) if not f.filename.endswith("check.py")),
                frame,
            )
            text = f"{type(error).__name__}: {error} (line {where.lineno}: {where.line})"
            os.write(writer, text.encode()[:4000])
            status = 1
        os._exit(status)
    _, wait_status = os.waitpid(pid, 0)
    # Do not wait for the end of file: a child of the test that cannot be killed would hold the pipe open.
    os.write(writer, b"\n")
    text = os.read(reader, 8192).decode().strip()
    os.close(writer)
    os.close(reader)
    if os.WIFSIGNALED(wait_status):
        raise AssertionError(f"ended by {signal.Signals(os.WTERMSIG(wait_status)).name}")
    match os.WEXITSTATUS(wait_status):
        case 0:
            return
        case 2:
            raise Skip(text)
        case _:
            raise AssertionError(text)


def as_user(uid, gid, groups, function, *arguments):
    """Runs the function in a process without privileges."""

    def body():
        os.setgroups(groups)
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        function(*arguments)

    in_child(body)


class Waiter:
    """A process that runs a function which is expected to wait."""

    def __init__(self, function):
        self.reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                function()
                os.write(writer, b"+")
            finally:
                os._exit(0)
        os.close(writer)

    def done_within(self, seconds):
        import select

        ready, _, _ = select.select([self.reader], [], [], seconds)
        return bool(ready) and os.read(self.reader, 1) == b"+"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.kill(self.pid, signal.SIGKILL)
        os.close(self.reader)
        # 5 s. A process that waits for a virtio-fs request cannot be killed; leave it.
        for _ in range(50):
            if os.waitpid(self.pid, os.WNOHANG) != (0, 0):
                return
            time.sleep(0.1)


# How long NFS may need, in seconds, to remove a file after its close, which a guest does not wait for.
PATIENCE = 60


def late(directory):
    """NFS names a removed file .nfs… until its last close."""
    return [name for _, _, names in os.walk(directory) for name in names if name.startswith(".nfs")]


def settle(directory):
    """Returns when removed files are gone."""
    deadline = time.monotonic() + PATIENCE
    while names := late(directory):
        assert time.monotonic() < deadline, f"removed files stay: {names[:5]}"
        time.sleep(0.1)


def remove(directory):
    """Removes a test's directory."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            shutil.rmtree(directory)
            break
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or time.monotonic() > deadline or not late(directory):
                raise
            time.sleep(0.1)
    assert not os.path.exists(directory)


def main(title, base, only=()):
    """Runs all tests, each in a directory of its own under base."""
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    os.umask(0o022)
    for function in tests:
        name = function.__name__.removeprefix("test_")
        if only and name not in only:
            continue
        directory = os.path.join(base, name)
        start = time.monotonic()

        def body():
            # 120 s: four times what the longest test needs in an emulated guest on a busy machine. Slower machines say more.
            signal.alarm(int(os.environ.get("TEST_LIMIT", 120)))
            os.mkdir(directory)
            os.chmod(directory, 0o755)
            function(directory)

        try:
            in_child(body)
            in_child(remove, directory)
            counts["passed"] += 1
            print(f"ok {name} ({time.monotonic() - start:.1f} s)", flush=True)
        except Skip as skip:
            counts["skipped"] += 1
            print(f"skipped {name}: {skip}", flush=True)
        except AssertionError as error:
            counts["failed"] += 1
            print(f"FAILED {name}: {error}", flush=True)
    print(f"note: {title}: " + ", ".join(f"{number} {what}" for what, number in counts.items()), flush=True)
    sys.exit(1 if counts["failed"] or not counts["passed"] else 0)

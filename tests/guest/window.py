"""Functions that the window tests share: commands on the host, mounts, mapped files."""

import atexit
import ctypes
import mmap
import os
import subprocess
import sys
import time
from contextlib import contextmanager

from check import *
from rings import address

S, MEET = "/mnt/s", "/mnt/meet"
# The guest maps this many bytes at once.
RANGE = 2 << 20
STATX_ATTR_DAX = 0x00200000
# The daemon's attributes are valid for 1 s.
SETTLED = 1.1
asked = 0


class Iovec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def host(command, patience=60):
    """Runs a shell command on the host, in the share's directory, and returns its output."""
    global asked
    asked += 1
    write(f"{MEET}/asking", command.encode())
    os.rename(f"{MEET}/asking", f"{MEET}/{asked}.ask")
    answer = f"{MEET}/{asked}.answer"
    deadline = time.monotonic() + patience
    while not os.path.exists(answer):
        assert time.monotonic() < deadline, f"the host is not done after {patience} s: {command[:200]}"
        time.sleep(0.01)
    output, _, status = read(answer).decode().rstrip("\n").rpartition("\n")
    assert status == "0", f"on the host, {command[:200]}: status {status}: {output}"
    return output


def start_agent(shares=(S,)):
    """Starts the guest agent, if the case has one, and waits until it repeats the changes of these mounted shares."""
    program = "/host/thruway-guest"
    if not os.path.exists(program):
        return None
    log = open("/tmp/agent.log", "ab", buffering=0)
    agent = subprocess.Popen([program], stderr=log)
    # User-Mode Linux does not power off while a process waits in a request.
    atexit.register(lambda: (agent.terminate(), agent.wait()))
    deadline = time.monotonic() + 60
    for share in shares:
        while f"{os.path.basename(share)}: changes by others are repeated" not in read("/tmp/agent.log").decode():
            assert agent.poll() is None and time.monotonic() < deadline, read("/tmp/agent.log").decode()
            time.sleep(0.01)
    return agent


def host_number(command):
    return int(host(command))


# A guest sees the host's changes within some seconds: attributes are valid for 1 s, and the copy that replaces the mapping of a
# truncated file's end stays for 3 s. The guard holds a process of the host for 2 s at most. 60 s: no test decides by how fast the
# machine is.
SEEN = 60
FROZEN = 60


def host_file(name, size, seed=1, new=False):
    """The host creates a file, or replaces it. `new`: the guest has not seen one of this name."""
    write(f"{MEET}/new", pattern(size, seed))
    host(f"cp ../meet/new {name}.new && mv {name}.new {name}")
    if not new:
        time.sleep(SETTLED)
    return f"{S}/{name}"


def timed(command):
    """Runs a command on the host and checks that it is not held for long."""
    took = float(host(f"TIMEFORMAT=%R; time {{ {command}; }}").split()[-1])
    assert took < FROZEN, f"{command}: the host's process waited {took} s"
    return took


def seen(what, function, due, limit=SEEN):
    start = time.monotonic()
    while (got := function()) != due:
        assert time.monotonic() - start < limit, f"{what}: {str(got)[:60]}, expected {str(due)[:60]} after {limit} s"
        time.sleep(0.05)
    print(f"ok {what} is seen after {time.monotonic() - start:.2f} s", flush=True)


def mount(tag, mode=None):
    os.makedirs(f"/mnt/{tag}", exist_ok=True)
    options = ["-o", f"dax={mode}"] if mode else []
    done = subprocess.run(["mount", "-t", "virtiofs", *options, tag, f"/mnt/{tag}"], capture_output=True, text=True)
    assert done.returncode == 0, f"mount {options} {tag}: {done.stderr.strip()}"


def umount(tag):
    done = subprocess.run(["umount", f"/mnt/{tag}"], capture_output=True, text=True)
    assert done.returncode == 0, f"umount {tag}: {done.stderr.strip()}"


def drop_caches():
    write("/proc/sys/vm/drop_caches", b"3", flags=os.O_WRONLY)


def is_dax(path):
    answer = ctypes.create_string_buffer(256)
    # 0x7ff is STATX_BASIC_STATS. The attributes are the second group of 8 bytes.
    call("statx", AT_FDCWD, os.fsencode(path), 0, 0x7FF, answer)
    return bool(int.from_bytes(answer.raw[8:16], "little") & STATX_ATTR_DAX)


@contextmanager
def mapped(path, size, writable=False):
    fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    view = mmap.mmap(fd, size, prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
    os.close(fd)
    try:
        yield view
    finally:
        view.close()


def page_in_a_pipe(view, at=0):
    """Puts a page of a writable mapping into a new pipe, which then holds it: vmsplice(2). Returns the pipe's two ends."""
    reader, writer = os.pipe()
    piece = Iovec(address(view, at), 4096)
    equal(call("vmsplice", writer, ctypes.byref(piece), 1, 0), 4096)
    return reader, writer


def read_disk(buffer):
    """Reads all of a buffer from the guest's disk by O_DIRECT, and compares it with what the page cache has."""
    disk, pages = os.open("/dev/vda", os.O_RDONLY | os.O_DIRECT), os.open("/dev/vda", os.O_RDONLY)
    equal(os.preadv(disk, [buffer], 0), len(buffer))
    equal(buffer, os.pread(pages, len(buffer), 0))
    os.close(disk)
    os.close(pages)


def read_mapped(path):
    size = os.stat(path).st_size
    if not size:
        return b""
    with mapped(path, size) as view:
        return view[:]


class Busy:
    """A process that repeats a function while the with block runs."""

    def __init__(self, function, name):
        self.function, self.name = function, name
        # Byte 0 stops the process. A counter of rounds is at byte 8.
        self.shared = mmap.mmap(-1, mmap.PAGESIZE)

    def rounds(self):
        return int.from_bytes(self.shared[8:16], "little")

    def __enter__(self):
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                while not self.shared[0]:
                    self.function()
                    self.shared[8:16] = (self.rounds() + 1).to_bytes(8, "little")
                status = 0
            except BaseException as error:
                print(f"{self.name}, round {self.rounds()}: {type(error).__name__}: {error}", flush=True)
            os._exit(status)
        return self

    def __exit__(self, kind, *_):
        self.shared[0] = 1
        # 30 s: a round takes a moment, even on a busy machine.
        for _ in range(300):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                break
            time.sleep(0.1)
        else:
            raise AssertionError(f"{self.name}: hangs in round {self.rounds()}")
        if kind is None:
            assert status == 0, f"{self.name}: ended with {os.waitstatus_to_exitcode(status)} in round {self.rounds()}"
            assert self.rounds() > 0, f"{self.name}: did nothing"


def steps(*functions):
    """Runs the steps in turn and stops at the first failure."""
    for function, *arguments in functions:
        name = " ".join([function.__name__, *map(str, arguments)])
        start = time.monotonic()
        try:
            function(*arguments)
        except (AssertionError, OSError, ValueError) as error:
            line = traceback.extract_tb(error.__traceback__)[1:2] or traceback.extract_tb(error.__traceback__)
            print(f"FAILED {name}: {type(error).__name__}: {error} (line {line[0].lineno}: {line[0].line})", flush=True)
            sys.exit(1)
        print(f"ok {name} ({time.monotonic() - start:.1f} s)", flush=True)

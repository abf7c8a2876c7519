"""Random changes on the host, and what the host's own inotify(7) reports of them: oracle.py SEED COUNT DIR... prints events and the state of
the directories as JSON. The guest uses the parts that watch and look."""

import ctypes
import hashlib
import json
import mmap
import os
import random
import shutil
import stat
import struct
import sys

MODIFY, ATTRIB, CLOSE_WRITE, MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x2, 0x4, 0x8, 0x40, 0x80, 0x100, 0x200
ISDIR, OVERFLOW, IGNORED = 0x40000000, 0x4000, 0x8000
ALL = MODIFY | ATTRIB | CLOSE_WRITE | MOVED_FROM | MOVED_TO | CREATE | DELETE
SENTINEL = "sentinel"
# A directory among the watched ones, which stays.
INNER = "inner"
libc = ctypes.CDLL(None, use_errno=True)
libc.inotify_add_watch.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32]


class Watcher:
    def __init__(self, directories, mask=ALL):
        self.fd = libc.inotify_init1(os.O_CLOEXEC)
        self.paths = {}
        for directory in directories:
            descriptor = libc.inotify_add_watch(self.fd, directory.encode(), mask)
            assert descriptor > 0, (directory, os.strerror(ctypes.get_errno()))
            self.paths[descriptor] = directory

    def until(self, sentinels, wait=lambda fd: None):
        """Events up to this one name in each directory, (directory, mask, cookie, name)."""
        events, left = [], {(directory, sentinels) for directory in self.paths.values()}
        while left:
            wait(self.fd)
            for directory, mask, cookie, name in self.now():
                if name.startswith(SENTINEL):
                    if mask & CREATE:
                        left.discard((directory, name))
                elif not mask & IGNORED:
                    events.append((directory, mask, cookie, name))
        return events

    def now(self):
        """The events that there are now, or the next ones."""
        data, at, events = os.read(self.fd, 1 << 20), 0, []
        while at < len(data):
            descriptor, mask, cookie, length = struct.unpack_from("iIII", data, at)
            assert not mask & OVERFLOW, "inotify's own queue is full"
            name = data[at + 16 : at + 16 + length].rstrip(b"\0").decode()
            at += 16 + length
            events.append((self.paths[descriptor], mask, cookie, name))
        return events


def streams(events):
    """For each name what happened to it, in order. What the kernel may merge between two changes of the name is one set."""
    names, cookies = {}, {}
    for directory, mask, cookie, name in events:
        if mask == ATTRIB | ISDIR and name and name != INNER:
            # The host's kernel does not say where a directory is whose attributes have changed.
            continue
        stream = names.setdefault(f"{directory}/{name}", [])
        if mask & (MODIFY | ATTRIB | CLOSE_WRITE):
            if not stream or not isinstance(stream[-1], list):
                stream.append([])
            bits = mask & ~ISDIR
            if bits not in stream[-1]:
                stream[-1] = sorted(stream[-1] + [bits])
        else:
            stream.append(mask)
        if cookie:
            cookies.setdefault(cookie, []).append(f"{mask & ~ISDIR:x} {directory}/{name}")
    return names, sorted(map(sorted, cookies.values()))


def within(part, whole):
    """Whether a stream is another one without some events."""
    rest = iter(whole)
    fits = lambda one, other: one == other or isinstance(one, list) and isinstance(other, list) and set(one) <= set(other)
    return all(any(fits(one, other) for other in rest) for one in part)


def size(names):
    return sum(len(one) if isinstance(one, list) else 1 for stream in names.values() for one in stream)


def order(events):
    """The new names in each directory, in order. Of a removal, the host's kernel may tell the daemon together with an earlier change of
    the same file."""
    made = [(directory, mask, name) for directory, mask, _, name in events if mask & (MOVED_FROM | MOVED_TO | CREATE)]
    return {key: [event[1:] for event in made if event[0] == key] for key in sorted({event[0] for event in made})}


def facts(path):
    """What stat, readlink, read and readdir say."""
    st = os.lstat(path)
    kind = stat.S_IFMT(st.st_mode)
    known = [kind, st.st_mode & 0o7777]
    if kind == stat.S_IFDIR:
        return known + [st.st_mtime_ns, sorted(os.listdir(path))]
    known += [st.st_nlink, st.st_size, st.st_mtime_ns]
    if kind == stat.S_IFLNK:
        return known + [os.readlink(path)]
    if kind == stat.S_IFREG:
        with open(path, "rb", buffering=0) as file:
            return known + [hashlib.sha1(file.read()).hexdigest()]
    return known


def state(directories):
    found = {}
    for top in directories:
        for directory, inner, files in os.walk(top):
            for name in [".", *inner, *files]:
                path = os.path.normpath(f"{directory}/{name}")
                found[path] = facts(path)
    return found


class Changes:
    """Random changes of a few names, so that they meet."""

    def __init__(self, seed, directories):
        self.random = random.Random(seed)
        self.directories = directories

    def place(self):
        return f"{self.random.choice(self.directories)}/{self.random.choice('abcdefgh')}"

    def known(self, kind=None):
        """A name that exists, or none."""
        found = [f"{d}/{n}" for d in self.directories for n in os.listdir(d) if not n.startswith(SENTINEL) and n != INNER]
        found = [path for path in sorted(found) if kind is None or kind(os.lstat(path).st_mode)]
        return self.random.choice(found) if found else None

    def create(self):
        # Of a FIFO it fails.
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NONBLOCK
        with open(os.open(self.place(), flags, 0o644), "wb", buffering=0) as file:
            file.write(self.random.randbytes(self.random.randrange(1, 9000)))

    def empty(self):
        os.close(os.open(self.place(), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))

    def append(self):
        with open(self.known(stat.S_ISREG), "ab", buffering=0) as file:
            file.write(b"more")

    def overwrite(self):
        """Keeps the size, and the times too now and then, as rsync -t does."""
        path = self.known(stat.S_ISREG)
        st = os.stat(path)
        with open(path, "r+b", buffering=0) as file:
            file.write(self.random.randbytes(min(16, st.st_size)))
        if self.random.random() < 0.5:
            os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))

    def store(self):
        with open(self.known(lambda mode: stat.S_ISREG(mode)), "r+b", buffering=0) as file:
            if os.fstat(file.fileno()).st_size:
                with mmap.mmap(file.fileno(), 0) as memory:
                    memory[0] = self.random.randrange(256)

    def truncate(self):
        os.truncate(self.known(stat.S_ISREG), self.random.randrange(5000))

    def chmod(self):
        """To no execute permission: programs are not opened, so nobody hears that they are closed."""
        os.chmod(self.known(lambda mode: not stat.S_ISLNK(mode)), self.random.choice((0o600, 0o644, 0o640, 0o666)))

    def touch(self):
        os.utime(self.known(), follow_symlinks=False)

    def touch_inner(self):
        os.utime(next(path for path in self.directories if path.endswith(INNER)))

    def rename(self):
        os.rename(self.known(), self.place())

    def exchange(self):
        first, second = self.known(), self.known()
        if first != second:
            call = libc.renameat2(-100, first.encode(), -100, second.encode(), 2)
            assert call == 0 or ctypes.get_errno() == 22, os.strerror(ctypes.get_errno())

    def link(self):
        os.link(self.known(stat.S_ISREG), self.place())

    def symlink(self):
        os.symlink(self.random.choice(("nowhere", "a")), self.place())

    def fifo(self):
        os.mkfifo(self.place())

    def mkdir(self):
        os.mkdir(self.place())

    def tree(self):
        path = self.place()
        os.makedirs(f"{path}/x/y")
        with open(f"{path}/x/y/file", "w", encoding="ascii") as file:
            file.write("deep")

    def remove(self):
        os.unlink(self.known(lambda mode: not stat.S_ISDIR(mode)))

    def remove_tree(self):
        shutil.rmtree(self.known(stat.S_ISDIR))

    def replace(self):
        """As editors do."""
        path = self.known(stat.S_ISREG)
        with open(f"{path}~", "xb", buffering=0) as file:
            file.write(self.random.randbytes(500))
        os.rename(f"{path}~", path)

    def passing(self):
        path = self.place() + ".tmp"
        with open(path, "xb", buffering=0) as file:
            file.write(b"gone soon")
        os.unlink(path)

    KINDS = [create] * 3 + [empty, append, append, overwrite, overwrite, store, truncate, chmod, touch, touch_inner, rename, rename, rename]
    KINDS += [exchange, link, symlink, fifo, mkdir, mkdir, tree, remove, remove, remove, remove_tree, replace, replace, passing]

    def one(self):
        kind = self.random.choice(self.KINDS)
        try:
            kind(self)
        except (OSError, TypeError):
            return None
        return kind.__name__


if __name__ == "__main__":
    seed, count, directories = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    watcher = Watcher(directories)
    changes = Changes(seed, directories)
    done = [name for name in (changes.one() for _ in range(count)) if name]
    for directory in directories:
        os.close(os.open(f"{directory}/{SENTINEL}{seed}", os.O_CREAT | os.O_EXCL))
    events = watcher.until(f"{SENTINEL}{seed}")
    print(json.dumps({"done": done, "events": events, "state": state(directories)}))

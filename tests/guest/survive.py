#!/usr/bin/env python3
"""survive.py DIRECTORY: works there until STOP is made beside it, while the host kills the daemon's worker. What each call gives is
compared with a model: no call may fail that does not fail on a local file system, or be done twice."""
import errno
import fcntl
import os
import random
import sys

top = sys.argv[1]
stop = os.path.join(os.path.dirname(top), "STOP")
seed = int.from_bytes(os.urandom(4), "little")
chance = random.Random(seed)
os.makedirs(top)
# Name: contents of a file, None for a directory, or a string for a symbolic link.
model = {}
done = 0


def path(name):
    return os.path.join(top, name)


def fail(what):
    print(f"FAILED {what} after {done} steps, seed {seed}", flush=True)
    sys.exit(1)


def refuses(wanted, call, *arguments):
    try:
        call(*arguments)
    except OSError as e:
        if e.errno != wanted:
            fail(f"{call.__name__}{arguments}: {e}, not {errno.errorcode[wanted]}")
        return
    fail(f"{call.__name__}{arguments} did what was done before")


def create(name):
    fd = os.open(path(name), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o640)
    data = chance.randbytes(chance.randrange(20000))
    os.write(fd, data)
    if chance.random() < 0.3:
        os.fsync(fd)
    os.close(fd)
    model[name] = data


def mkdir(name):
    os.mkdir(path(name))
    model[name] = None


def symlink(name):
    os.symlink(name[::-1], path(name))
    model[name] = name[::-1]


def append(name):
    data = chance.randbytes(100)
    fd = os.open(path(name), os.O_WRONLY | os.O_APPEND)
    for _ in range(3):
        os.write(fd, data)
        model[name] += data
    os.close(fd)


def remove(name):
    if model[name] is None:
        os.rmdir(path(name))
    else:
        os.unlink(path(name))
    del model[name]


def compare(name):
    is_of = model[name]
    if is_of is None:
        if os.listdir(path(name)):
            fail(f"{name} is not empty")
    elif isinstance(is_of, str):
        if os.readlink(path(name)) != is_of:
            fail(f"{name} leads elsewhere")
    else:
        with open(path(name), "rb") as file:
            if file.read() != is_of:
                fail(f"{name} has other contents")


def nameless(name):
    """A file that loses its name while it is open, and is locked."""
    fd = os.open(path(name), os.O_CREAT | os.O_EXCL | os.O_RDWR)
    fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.unlink(path(name))
    data = chance.randbytes(5000)
    os.write(fd, data)
    os.fsync(fd)
    if os.fstat(fd).st_nlink != 0 or os.pread(fd, 6000, 0) != data:
        fail(f"{name}, which has no name, is another file")
    os.close(fd)


def step():
    name = f"n{chance.randrange(60)}"
    if name not in model:
        refuses(errno.ENOENT, os.unlink, path(name))
        chance.choice([create, create, mkdir, symlink, nameless])(name)
        return
    refuses(errno.EEXIST, os.mkdir, path(name))
    to = f"n{chance.randrange(60)}"
    what = chance.randrange(6)
    if what == 0:
        compare(name)
    elif what == 1 and isinstance(model[name], bytes):
        append(name)
    elif what == 2 and to not in model:
        os.rename(path(name), path(to))
        model[to] = model.pop(name)
        refuses(errno.ENOENT, os.rename, path(name), path(to))
    elif what == 3 and to not in model and isinstance(model[name], bytes):
        os.link(path(name), path(to))
        os.unlink(path(name))
        model[to] = model.pop(name)
    elif what == 4 and isinstance(model[name], bytes):
        os.setxattr(path(name), "user.survive", b"1", os.XATTR_CREATE)
        os.removexattr(path(name), "user.survive")
    else:
        remove(name)


try:
    while not os.path.exists(stop):
        for _ in range(20):
            step()
            done += 1
    if sorted(os.listdir(top)) != sorted(model):
        fail(f"other names: {sorted(set(os.listdir(top)) ^ set(model))}")
    for name in list(model):
        compare(name)
except OSError as e:
    fail(str(e))
print(f"ok: {done} steps", flush=True)

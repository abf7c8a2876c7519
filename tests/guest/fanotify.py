"""What the host does to the share reaches the guest's fanotify(7)."""

import ctypes
import os
import select
import struct

from window import *

# include/uapi/linux/fanotify.h
CLOEXEC, REPORT_FID, REPORT_DFID_NAME, MARK_ADD = 0x1, 0x200, 0xC00, 0x1
MODIFY, ATTRIB, CLOSE_WRITE, MOVED_FROM, MOVED_TO, CREATE, DELETE = 0x2, 0x4, 0x8, 0x40, 0x80, 0x100, 0x200
DELETE_SELF, OVERFLOW, ON_CHILD, ONDIR = 0x400, 0x4000, 0x08000000, 0x40000000
INFO_FID, INFO_DFID_NAME = 1, 2
AT_HANDLE_FID = 0x200
# A limit on hangs, in seconds.
LIMIT = 100


def handle(path):
    """The file handle by which events call a file."""
    buffer = ctypes.create_string_buffer(struct.pack("Ii", 128, 0), 8 + 128)
    mount = ctypes.c_int()
    call("name_to_handle_at", AT_FDCWD, os.fsencode(path), buffer, ctypes.byref(mount), AT_HANDLE_FID)
    length, _ = struct.unpack_from("Ii", buffer.raw)
    return buffer.raw[4 : 8 + length]


class Group:
    def __init__(self, flags):
        self.fd = call("fanotify_init", CLOEXEC | flags, os.O_RDONLY)

    def mark(self, path, mask):
        call("fanotify_mark", self.fd, MARK_ADD, ctypes.c_uint64(mask), AT_FDCWD, os.fsencode(path))

    def read(self):
        """Waits for events: (mask, handle, name), with the directory's handle if there is a name."""
        ready, _, _ = select.select([self.fd], [], [], LIMIT)
        assert ready, "no event came"
        data, events = os.read(self.fd, 1 << 16), []
        while data:
            length, _, _, head, mask, _, pid = struct.unpack_from("IBBHQii", data)
            assert not mask & OVERFLOW, "events were lost"
            info, data, file, name = data[head:length], data[length:], None, None
            while info:
                kind, _, size = struct.unpack_from("BBH", info)
                count, _ = struct.unpack_from("Ii", info, 12)
                if kind == INFO_DFID_NAME:
                    file, name = info[16 : 20 + count], info[20 + count : size].split(b"\0")[0].decode()
                elif kind == INFO_FID and name is None:
                    file = info[16 : 20 + count]
                info = info[size:]
            events.append((mask, file, name))
        return events

    def until(self, last):
        """All bits of each name up to this one: the kernel merges events."""
        masks = {}
        while not masks.get(last[1:], 0) & last[0]:
            for mask, file, name in self.read():
                masks[file, name] = masks.get((file, name), 0) | mask
        return masks


def fanotify():
    host("mkdir fan && echo 1 >fan/self")
    directory, file = handle(f"{S}/fan"), handle(f"{S}/fan/self")
    names = Group(REPORT_DFID_NAME)
    names.mark(f"{S}/fan", MODIFY | ATTRIB | CLOSE_WRITE | MOVED_FROM | MOVED_TO | CREATE | DELETE | ON_CHILD | ONDIR)
    files = Group(REPORT_FID)
    files.mark(f"{S}/fan/self", MODIFY | ATTRIB | CLOSE_WRITE | DELETE_SELF)
    host("echo 1 >fan/a && chmod 600 fan/a && mv fan/a fan/b && rm fan/b && mkdir fan/d && rmdir fan/d")
    equal(
        names.until((DELETE, directory, "d")),
        {
            (directory, "a"): CREATE | MODIFY | ATTRIB | CLOSE_WRITE | MOVED_FROM,
            (directory, "b"): MOVED_TO | DELETE,
            (directory, "d"): CREATE | DELETE | ONDIR,
        },
    )
    host("echo 2 >>fan/self && chmod 600 fan/self && rm fan/self")
    equal(files.until((DELETE_SELF, file, None)), {(file, None): MODIFY | ATTRIB | CLOSE_WRITE | DELETE_SELF})

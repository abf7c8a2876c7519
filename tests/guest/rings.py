"""Asynchronous reads and writes: Linux's own io_submit(2), and io_uring by liburing."""

import ctypes
import os
import struct

from check import call

# The numbers of x86-64.
IO_SETUP, IO_DESTROY, IO_GETEVENTS, IO_SUBMIT = 206, 207, 208, 209
READ, WRITE = "read", "write"


def address(buffer, at=0):
    """Where the bytes of a writable buffer are. The buffer must stay."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer, at))


class Aio:
    """A context of io_submit(2)."""

    def __init__(self):
        self.context = ctypes.c_ulong()
        call("syscall", IO_SETUP, 16, ctypes.byref(self.context))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        call("syscall", IO_DESTROY, self.context)

    def transfer(self, kind, *pieces):
        """Submits all pieces, (descriptor, address, length, offset), at once and returns their results in order."""
        blocks = [
            # struct iocb, with the piece's number as its data. IOCB_CMD_PREAD is 0, IOCB_CMD_PWRITE 1.
            ctypes.create_string_buffer(
                struct.pack("QIiHhIQQqQII", n, 0, 0, int(kind == WRITE), 0, fd, at, length, offset, 0, 0, 0), 64
            )
            for n, (fd, at, length, offset) in enumerate(pieces)
        ]
        pointers = (ctypes.c_void_p * len(blocks))(*map(ctypes.addressof, blocks))
        events = ctypes.create_string_buffer(32 * len(blocks))
        results = {}
        submitted = 0
        while submitted < len(blocks):
            rest = ctypes.byref(pointers, submitted * ctypes.sizeof(ctypes.c_void_p))
            submitted += call("syscall", IO_SUBMIT, self.context, ctypes.c_long(len(blocks) - submitted), rest)
        while len(results) < len(blocks):
            got = call("syscall", IO_GETEVENTS, self.context, ctypes.c_long(1), ctypes.c_long(len(blocks)), events, None)
            for number, _, result, _ in struct.iter_unpack("QQqq", events.raw[: 32 * got]):
                results[number] = result
        return [results[number] for number in range(len(blocks))]


class Uring:
    """A ring of io_uring."""

    def __init__(self):
        self.lib = ctypes.CDLL("liburing-ffi.so.2")
        self.lib.io_uring_get_sqe.restype = ctypes.c_void_p
        # Twice the size of struct io_uring.
        self.ring = ctypes.create_string_buffer(512)
        self._checked("queue_init", 16, self.ring, 0)
        self.fixed = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lib.io_uring_queue_exit(self.ring)

    def _checked(self, name, *arguments):
        result = getattr(self.lib, f"io_uring_{name}")(*arguments)
        if result < 0:
            raise OSError(-result, os.strerror(-result), name)
        return result

    def register(self, at, length):
        """From now on all transfers are within this buffer."""
        self._checked("register_buffers", self.ring, (ctypes.c_ulong * 2)(at, length), 1)
        self.fixed = True

    def transfer(self, kind, *pieces):
        """Submits all pieces, (descriptor, address, length, offset), at once and returns their results in order."""
        prepare = getattr(self.lib, f"io_uring_prep_{kind}{'_fixed' if self.fixed else ''}")
        for number, (fd, at, length, offset) in enumerate(pieces):
            sqe = ctypes.c_void_p(self.lib.io_uring_get_sqe(self.ring))
            extra = (0,) if self.fixed else ()
            prepare(sqe, fd, ctypes.c_void_p(at), ctypes.c_uint(length), ctypes.c_ulong(offset), *extra)
            self.lib.io_uring_sqe_set_data64(sqe, ctypes.c_ulong(number))
        self._checked("submit_and_wait", self.ring, len(pieces))
        results = {}
        for _ in pieces:
            cqe = ctypes.c_void_p()
            self._checked("wait_cqe", self.ring, ctypes.byref(cqe))
            # struct io_uring_cqe: the data, the result.
            number, result = struct.unpack("Qi", ctypes.string_at(cqe.value, 12))
            results[number] = result
            self.lib.io_uring_cqe_seen(self.ring, cqe)
        return [results[number] for number in range(len(pieces))]

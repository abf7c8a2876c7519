#!/usr/bin/python3
"""A daemon that maps and unmaps before its device is started: qemu-early.py QEMU ARGUMENT... QEMU must refuse, and stay."""

import array
import os
import socket
import struct
import subprocess
import sys
import tempfile

# vhost-user's messages (QEMU's docs/interop/vhost-user.rst).
GET_FEATURES, GET_PROTOCOL_FEATURES, GET_QUEUE_NUM, SET_BACKEND_REQ_FD, GET_SHMEM_CONFIG = 1, 15, 17, 21, 44
SHMEM_MAP, SHMEM_UNMAP = 9, 10
VERSION, REPLY, NEED_REPLY = 1, 4, 8
# PROTOCOL_FEATURES and VIRTIO_F_VERSION_1; MQ, REPLY_ACK, BACKEND_REQ and SHMEM.
FEATURES, PROTOCOL_FEATURES = 1 << 30 | 1 << 32, 1 | 1 << 3 | 1 << 5 | 1 << 22
SIZE = 2 << 20


def receive(stream):
    """A message: its request, flags, payload and file descriptors."""
    head, ancillary, _, _ = stream.recvmsg(12, socket.CMSG_SPACE(64 * 4))
    assert head, "QEMU closed the connection"
    fds = array.array("i")
    for _, _, data in ancillary:
        fds.frombytes(data[: len(data) // 4 * 4])
    request, flags, size = struct.unpack("<III", head)
    return request, flags, stream.recv(size, socket.MSG_WAITALL) if size else b"", list(fds)


def answer(stream, request, payload):
    stream.sendall(struct.pack("<III", request, VERSION | REPLY, len(payload)) + payload)


with tempfile.TemporaryDirectory() as directory:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{directory}/fs")
    listener.listen()
    device = ["-chardev", f"socket,id=fs,path={directory}/fs", "-device", "vhost-user-fs-pci,tag=fs,chardev=fs"]
    machine = ["-machine", "q35", "-nodefaults", "-display", "none", "-S", "-m", "64M"]
    qemu = subprocess.Popen([*sys.argv[1:], *machine, *device])
    # 60 s: far longer than on a busy machine.
    listener.settimeout(60)
    stream, _ = listener.accept()
    stream.settimeout(60)
    backend = None
    numbers = {GET_FEATURES: FEATURES, GET_PROTOCOL_FEATURES: PROTOCOL_FEATURES, GET_QUEUE_NUM: 2}
    while True:
        request, flags, payload, fds = receive(stream)
        if request == SET_BACKEND_REQ_FD:
            backend = socket.socket(fileno=fds[0])
        if request in numbers:
            answer(stream, request, struct.pack("<Q", numbers[request]))
        elif request == GET_SHMEM_CONFIG:
            answer(stream, request, struct.pack("<II256Q", 1, 0, SIZE, *[0] * 255))
            break
        elif flags & NEED_REPLY:
            answer(stream, request, bytes(8))
    backend.settimeout(60)
    file = os.memfd_create("file")
    os.truncate(file, SIZE)
    for request, ancillary in [
        (SHMEM_MAP, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file]))]),
        (SHMEM_UNMAP, []),
    ]:
        message = struct.pack("<IIIB7xQQQQ", request, VERSION | NEED_REPLY, 40, 0, 0, 0, SIZE, 1)
        backend.sendmsg([message], ancillary)
        got, _, payload, _ = receive(backend)
        assert got == request and struct.unpack("<Q", payload) != (0,), (got, payload)
        print(f"ok request {request} is refused", flush=True)
    assert qemu.poll() is None
    qemu.kill()
    qemu.wait()

#!/usr/bin/env python3
"""A vhost-user virtio-fs device of its own, which sends every kind of notification when the guest asks for it.

It serves a small tree with validity times of an hour, so that the guest sees a change only if it was notified. A LOOKUP of a name
that begins with @ in the root directory is a command: its words are separated by spaces. The answer is always ENOENT, and what the
command sends comes after it. The file "log" tells what the guest has sent.

Options: --socket-path=PATH --tag TAG; others are ignored, as boot gives them."""

import array
import errno
import mmap
import os
import select
import socket
import struct
import sys
import time

FEATURES = 1 << 32 | 1 << 30 | 1  # VERSION_1, vhost-user protocol features, VIRTIO_FS_F_NOTIFICATION
PROTOCOL = 1 << 0 | 1 << 3 | 1 << 9  # MQ, REPLY_ACK, CONFIG
NOTIFY_BUF_SIZE = 2048
QUEUES = 8
HOUR = 3600

# The names of the vhost-user messages and the FUSE operations that are served.
GET_FEATURES, SET_FEATURES, SET_MEM_TABLE, SET_NUM, SET_ADDR, SET_BASE, GET_BASE, SET_KICK, SET_CALL = 1, 2, 5, 8, 9, 10, 11, 12, 13
GET_PROTOCOL_FEATURES, GET_QUEUE_NUM, SET_ENABLE, GET_CONFIG = 15, 17, 18, 24
LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE, STATFS, RELEASE, FSYNC = 1, 2, 3, 4, 14, 15, 16, 17, 18, 20
FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, DESTROY, NOTIFY_REPLY, BATCH_FORGET = 25, 26, 27, 28, 29, 38, 41, 42
INVAL_INODE, INVAL_ENTRY, STORE, RETRIEVE, DELETE, RESEND, INC_EPOCH, PRUNE = 2, 3, 4, 5, 6, 7, 8, 9


class Tree:
    """Nodes by number: a dictionary of names is a directory, bytes are a file. Node 9 is the log."""

    LOG = 9

    def __init__(self):
        root = {"f": 2, "d": 3, "g": 5, "s": 6, "log": self.LOG}
        self.nodes = {1: root, 2: b"hello\n", 3: {"x": 4}, 4: b"in d\n", 5: b"other\n", 6: b""}
        self.log = []

    def data(self, node):
        return "".join(line + "\n" for line in self.log).encode() if node == self.LOG else self.nodes[node]

    def attr(self, node):
        data = self.data(node)
        mode, size = (0o40755, 0) if isinstance(data, dict) else (0o100644, len(data))
        return struct.pack("<6Q10I", node, size, 0, 1, 1, 1, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)


class Queue:
    def __init__(self):
        self.size = self.next = self.done = self.descriptors = self.used = self.available = self.seen = 0
        self.kick = self.call = None


class Device:
    def __init__(self, connection, tag):
        self.connection = connection
        self.config = tag.encode().ljust(36, b"\0") + struct.pack("<II", 1, NOTIFY_BUF_SIZE)
        self.queues = [Queue() for _ in range(QUEUES)]
        self.regions = []
        self.notifies = False
        self.tree = Tree()
        self.pending = []
        self.late, self.buffers = None, 0

    # Guest memory and virtqueues.

    def place(self, address, user):
        for guest, size, mapped, offset, memory in self.regions:
            base = mapped if user else guest
            if base <= address < base + size:
                return memory, address - base + offset
        raise KeyError(hex(address))

    def read(self, address, length, user=False):
        memory, at = self.place(address, user)
        return memory[at : at + length]

    def write(self, address, data, user=False):
        memory, at = self.place(address, user)
        memory[at : at + len(data)] = data

    def number(self, form, address):
        return struct.unpack(form, self.read(address, struct.calcsize(form), True))[0]

    def take(self, queue):
        """The head of the next chain, its readable bytes and its writable buffers."""
        if not queue.descriptors or self.number("<H", queue.available + 2) == queue.next:
            return None
        head = index = self.number("<H", queue.available + 4 + 2 * (queue.next % queue.size))
        queue.next = queue.next + 1 & 0xFFFF
        readable, writable = b"", []
        while True:
            address, length, flags, following = struct.unpack("<QIHH", self.read(queue.descriptors + 16 * index, 16, True))
            if flags & 2:
                writable.append((address, length))
            else:
                readable += self.read(address, length)
            if not flags & 1:
                return head, readable, writable
            index = following

    def give(self, queue, head, length):
        at = queue.used + 4 + 8 * (queue.done % queue.size)
        self.write(at, struct.pack("<II", head, length), True)
        queue.done = queue.done + 1 & 0xFFFF
        self.write(queue.used + 2, struct.pack("<H", queue.done), True)

    def signal(self, queue):
        if queue.call is not None:
            os.eventfd_write(queue.call, 1)

    def fill(self, writable, data):
        for address, length in writable:
            self.write(address, data[:length])
            data = data[length:]

    # Notifications.

    def notify(self, code, body, unique=0, length=None, used=None):
        length = 16 + len(body) if length is None else length
        self.pending.append((struct.pack("<IiQ", length, code, unique) + body, used))

    def offered(self):
        """Buffers for notifications that the driver has offered, and that were not used."""
        queue = self.queues[1]
        queue.seen = self.number("<H", queue.available + 2)
        return queue.seen - queue.done & 0xFFFF

    def send(self):
        queue, sent = self.queues[1], False
        if self.notifies and queue.descriptors:
            self.buffers = max(self.buffers, self.offered())
        while self.notifies and self.pending and (chain := self.take(queue)):
            head, _, writable = chain
            message, used = self.pending.pop(0)
            self.fill(writable, message[:NOTIFY_BUF_SIZE])
            self.give(queue, head, len(message) if used is None else used)
            sent = True
        if sent:
            self.signal(queue)

    def stop(self, queue):
        """The driver takes back its buffers, which moves the available index back, after it has stopped the queue."""
        if queue.descriptors and self.number("<H", queue.available + 2) - queue.seen & 0x8000:
            sys.exit("the driver took back its buffers while the queue was running")
        queue.descriptors = 0

    def command(self, words):
        name, *rest = words
        getattr(self, "do_" + name)(*(int(word) if word.lstrip("-").isdigit() else word for word in rest))

    def do_set(self, node, text):
        self.tree.nodes[node] = text.encode()

    def do_link(self, parent, name, node):
        self.tree.nodes[parent][name] = node

    def do_unlink(self, parent, name):
        del self.tree.nodes[parent][name]

    def do_forget_log(self):
        self.tree.log.clear()

    def do_inval_inode(self, node, offset=0, length=0):
        self.notify(INVAL_INODE, struct.pack("<Qqq", node, offset, length))

    def do_inval_entry(self, parent, name, flags=1):
        self.notify(INVAL_ENTRY, struct.pack("<QII", parent, len(name), flags) + name.encode() + b"\0")

    def do_delete(self, parent, child, name):
        self.notify(DELETE, struct.pack("<QQII", parent, child, len(name), 0) + name.encode() + b"\0")

    def do_store(self, node, offset, text):
        self.notify(STORE, struct.pack("<QQII", node, offset, len(text), 0) + text.encode())

    def do_retrieve(self, node, offset, size):
        self.notify(RETRIEVE, struct.pack("<QQQII", 77, node, offset, size, 0))

    def do_resend(self):
        self.notify(RESEND, b"")

    def do_inc_epoch(self):
        self.notify(INC_EPOCH, b"")

    def do_prune(self, *nodes):
        self.notify(PRUNE, struct.pack("<IIQ", len(nodes), 0, 0) + struct.pack(f"<{len(nodes)}Q", *nodes))

    def do_flood(self, count):
        for _ in range(count):
            self.do_inval_inode(2, -1)

    def do_overtake(self, opcode, node, *commands):
        """The reply to the next such request comes after the notifications of these commands, and says what was before them."""
        self.late = opcode, node, " ".join(map(str, commands)).split(" , ")

    def overtake(self):
        (_, _, commands), self.late = self.late, None
        for command in commands:
            self.command(command.split(" "))
        self.send()
        # The driver offers a buffer again once it has handled the notification in it. 60 s: a limit on hangs.
        deadline = time.monotonic() + 60
        while self.offered() < self.buffers:
            if time.monotonic() > deadline:
                return
            time.sleep(0.001)
        self.tree.log.append("overtook")

    def do_malformed(self):
        """Everything that a daemon could get wrong."""
        inode = struct.pack("<Qqq", 2, 0, 0)
        for code in (-1, 0, 10, 77, 1 << 30):
            self.notify(code, b"")
            self.notify(code, inode)
        for code in range(1, 10):
            # No body, half a body, too long a body, garbage.
            for body in (b"", b"\1" * 7, bytes(2000), b"\xff" * 1000, struct.pack("<Q", 1 << 63) * 5):
                self.notify(code, body)
        self.notify(INVAL_INODE, inode, unique=5)
        for length in (0, 15, 39, 41, 1 << 31):
            self.notify(INVAL_INODE, inode, length=length)
        for used in (0, 1, 15, 16, 39, 2049, 4097, 1 << 31, 0xFFFFFFFF):
            self.notify(INVAL_INODE, inode, used=used)
        for name, length in ((b"f", 1), (b"f\0", 0), (b"f\0", 2), (b"f\0", 0xFFFFFFFF), (b"n" * 1100 + b"\0", 1100), (b"\0", 0)):
            self.notify(INVAL_ENTRY, struct.pack("<QII", 1, length, 0xFFFFFFFE) + name)
            self.notify(DELETE, struct.pack("<QQII", 1, 2, length, 0) + name)
        for node in (0, 12345, 1 << 63, (1 << 64) - 1):
            self.do_inval_inode(node)
            self.do_inval_entry(node, "f")
            self.do_delete(node, node, "f")
            self.do_store(node, 0, "x")
            self.do_retrieve(node, 0, 10)
            self.do_prune(node)
        for offset, length in ((1 << 62, 1 << 62), (-(1 << 63), -1), ((1 << 63) - 1, (1 << 63) - 1)):
            self.do_inval_inode(2, offset, length)
        for node, offset in ((1, 0), (3, 5), (2, (1 << 63) + 1), (2, (1 << 64) - 1)):
            self.notify(STORE, struct.pack("<QQII", node, offset, 4, 0) + b"evil")
            self.notify(RETRIEVE, struct.pack("<QQQII", 78, node, offset, 4, 0))
        self.notify(STORE, struct.pack("<QQII", 5, 0, 1 << 31, 0) + b"short")
        self.notify(PRUNE, struct.pack("<IIQ", 0xFFFFFFFF, 0, 0))
        # A mount point and the root.
        self.do_delete(1, 3, "log")
        self.do_prune(1, 1, 1)

    # FUSE.

    def serve(self, opcode, node, body):
        """The errno and the body of the reply. None: there is no reply."""
        tree = self.tree
        if opcode == INIT:
            flags = 1 << 0 | 1 << 5  # ASYNC_READ, BIG_WRITES
            return 0, struct.pack("<4I2H2I2H3I", 7, 45, 1 << 17, flags, 12, 10, 1 << 17, 1, 32, 0, 0, 0, 0).ljust(64, b"\0")
        if opcode == LOOKUP:
            name = body.split(b"\0")[0].decode()
            if node == 1 and name.startswith("@"):
                self.command(name[1:].split(" "))
                return errno.ENOENT, b""
            child = tree.nodes[node].get(name)
            tree.log.append(f"lookup {node} {name}")
            return (0, self.entry(child)) if child else (errno.ENOENT, b"")
        if opcode in (GETATTR, SETATTR):
            tree.log.append(f"{'getattr' if opcode == GETATTR else 'setattr'} {node}")
            return 0, struct.pack("<QII", 0 if node == tree.LOG else HOUR, 0, 0) + tree.attr(node)
        if opcode in (OPEN, OPENDIR):
            # KEEP_CACHE, and DIRECT_IO for the log.
            return 0, struct.pack("<QII", 0, 1 if node == tree.LOG else 2, 0)
        if opcode == READ:
            _, offset, size = struct.unpack_from("<QQI", body)
            if node != tree.LOG:
                tree.log.append(f"read {node}")
            return 0, tree.data(node)[offset : offset + size]
        if opcode == READDIR:
            _, offset, _ = struct.unpack_from("<QQI", body)
            entries = list(tree.nodes[node].items())[offset:]
            out = b""
            for position, (name, child) in enumerate(entries, offset + 1):
                kind = 4 if isinstance(tree.nodes.get(child), dict) else 8
                entry = struct.pack("<QQII", child, position, len(name), kind) + name.encode()
                out += entry.ljust(len(entry) + 7 & ~7, b"\0")
            return 0, out
        if opcode == STATFS:
            return 0, struct.pack("<5Q4I", 1, 1, 1, 1, 1, 4096, 255, 4096, 0).ljust(80, b"\0")
        if opcode in (FLUSH, RELEASE, RELEASEDIR, FSYNC, DESTROY):
            return 0, b""
        if opcode == NOTIFY_REPLY:
            _, offset, size = struct.unpack_from("<QQI", body)
            tree.log.append(f"retrieved {node} {offset} {body[40 : 40 + size].decode(errors='replace').strip()}")
            return None
        if opcode in (FORGET, BATCH_FORGET):
            at = 8 if opcode == BATCH_FORGET else 0
            nodes = [struct.unpack_from("<Q", body, at)[0] for at in range(at, len(body), 16)] if at else [node]
            tree.log.extend(f"forget {node}" for node in nodes)
            return None
        return errno.ENOSYS, b""

    def entry(self, node):
        return struct.pack("<4QII", node, 1, HOUR, HOUR, 0, 0) + self.tree.attr(node)

    def drain(self, queue):
        served = False
        while chain := self.take(queue):
            head, request, writable = chain
            _, opcode, unique, node = struct.unpack_from("<IIQQ", request)
            is_late = self.late is not None and self.late[:2] == (opcode, node)
            reply = self.serve(opcode, node, request[40:])
            if is_late:
                self.overtake()
            message = b""
            if reply:
                message = struct.pack("<IiQ", 16 + len(reply[1]), -reply[0], unique) + reply[1]
            self.fill(writable, message)
            self.give(queue, head, len(message))
            served = True
        if served:
            self.signal(queue)
        self.send()

    # vhost-user.

    def answer(self, request, body):
        self.connection.sendall(struct.pack("<III", request, 5, len(body)) + body)

    def receive(self, length):
        data, files = b"", []
        while len(data) < length:
            more, ancillary, _, _ = self.connection.recvmsg(length - len(data), 4096)
            if not more:
                sys.exit(0)
            data += more
            for _, _, content in ancillary:
                files += array.array("i", content).tolist()
        return data, files

    def message(self):
        head, files = self.receive(12)
        request, flags, size = struct.unpack("<III", head)
        body, more = self.receive(size)
        files += more
        value = struct.unpack_from("<Q", body)[0] if size >= 8 else 0
        word = struct.unpack_from("<I", body)[0] if size >= 4 else 0
        queue = self.queues[(value & 0xFF if request in (SET_KICK, SET_CALL) else word) % QUEUES]
        if request == GET_FEATURES:
            return self.answer(request, struct.pack("<Q", FEATURES))
        if request == GET_PROTOCOL_FEATURES:
            return self.answer(request, struct.pack("<Q", PROTOCOL))
        if request == GET_QUEUE_NUM:
            return self.answer(request, struct.pack("<Q", QUEUES))
        if request == GET_CONFIG:
            offset, length, _ = struct.unpack_from("<III", body)
            return self.answer(request, body[:12] + self.config.ljust(4096, b"\0")[offset : offset + length])
        if request == GET_BASE:
            self.stop(queue)
            return self.answer(request, struct.pack("<II", word, queue.next))
        if request == SET_FEATURES:
            self.notifies = value & 1 != 0
        elif request == SET_MEM_TABLE:
            self.regions = []
            for n, file in enumerate(files):
                guest, length, user, offset = struct.unpack_from("<4Q", body, 8 + 32 * n)
                self.regions.append((guest, length, user, offset, mmap.mmap(file, length + offset)))
                os.close(file)
        elif request == SET_NUM:
            queue.size = struct.unpack_from("<II", body)[1]
        elif request == SET_BASE:
            queue.next = queue.seen = struct.unpack_from("<II", body)[1]
        elif request == SET_ADDR:
            _, _, queue.descriptors, queue.used, queue.available, _ = struct.unpack_from("<IIQQQQ", body)
            queue.done = self.number("<H", queue.used + 2)
        elif request == SET_ENABLE:
            if not struct.unpack_from("<II", body)[1]:
                self.stop(queue)
        elif request == SET_KICK:
            queue.kick = files[0] if files else None
        elif request == SET_CALL:
            queue.call = files[0] if files else None
        if flags & 8:
            self.answer(request, struct.pack("<Q", 0))

    def run(self):
        while True:
            kicks = {queue.kick: n for n, queue in enumerate(self.queues) if queue.kick is not None}
            ready, _, _ = select.select([self.connection, *kicks], [], [])
            if self.connection in ready:
                self.message()
                continue
            for kick in ready:
                os.eventfd_read(kick)
                if kicks[kick] == 1 and self.notifies:
                    self.send()
                else:
                    self.drain(self.queues[kicks[kick]])


def main():
    path = next(word.split("=", 1)[1] for word in sys.argv if word.startswith("--socket-path="))
    tag = sys.argv[sys.argv.index("--tag") + 1]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)
    Device(listener.accept()[0], tag).run()


main()

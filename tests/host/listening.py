#!/usr/bin/python3
"""listening.py SOCKET FD COMMAND...: runs the command with a listening socket as descriptor FD, as libvirt, Kata, Incus and Proxmox do."""

import os
import socket
import sys

path, number, command = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(path)
os.chmod(path, 0o777)
listener.listen(1)
os.dup2(listener.fileno(), number)
os.set_inheritable(number, True)
os.execvp(command[0], command)

#!/usr/bin/python3
"""open-files.py DIRECTORY COUNT: creates COUNT files, keeps them all open, and writes and reads each of them. Ends when the host
makes the file "end"."""
import os
import resource
import sys
import time

share, count = sys.argv[1], int(sys.argv[2])
with open('/proc/sys/fs/file-max', 'w') as most:
    most.write(str(count * 2))
with open('/proc/sys/fs/nr_open', 'w') as most:
    most.write(str(1 << 21))
resource.setrlimit(resource.RLIMIT_NOFILE, (count + count // 1000 + 1000,) * 2)


def drop_caches():
    os.sync()
    with open('/proc/sys/vm/drop_caches', 'w') as drop:
        drop.write('3')


files = []
for number in range(count):
    directory = f'{share}/{number // 1000}'
    if number % 1000 == 0:
        os.mkdir(directory)
        print(f'{number} files', flush=True)
    files.append(os.open(f'{directory}/{number}', os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o400))
directories = [os.open(f'{share}/{number}', os.O_RDONLY) for number in range(count // 1000)]
for number, file in enumerate(files):
    assert os.pwrite(file, b'%d' % number, 0) > 0
    if number % 10000 == 0:
        print(f'{number} files written', flush=True)
# Removed files stay open too.
for number in range(0, count, 1000):
    os.unlink(f'{share}/{number // 1000}/{number}')
drop_caches()
print(f'open {len(files)}', flush=True)
for number, file in enumerate(files):
    assert os.pread(file, 100, 0) == b'%d' % number, number
    if number % 10000 == 0:
        print(f'{number} files read', flush=True)
for number, directory in enumerate(directories):
    names = {str(name) for name in range(number * 1000 + 1, number * 1000 + 1000)}
    assert set(os.listdir(directory)) == names, number
print(f'read {len(files)}', flush=True)
while not os.path.exists(f'{share}/end'):
    time.sleep(0.1)

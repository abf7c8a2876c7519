#!/bin/bash
# again.sh NUMBER: a next guest finds what the one before left, and writes.
grep -q 'record 000300' /mnt/s/log && echo "$1" >"/mnt/s/again-$1" && sync

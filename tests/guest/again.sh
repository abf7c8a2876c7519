#!/bin/bash
# again.sh NUMBER: a later guest finds the data of the previous one, and writes.
grep -q 'record 000300' /mnt/s/log && echo "$1" >"/mnt/s/again-$1" && sync

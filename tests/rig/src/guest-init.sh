#!/bin/busybox sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# The guest's first process: prepares the system, loads modules, runs the command, tells the host how it ended.
echo "init: up"
/bin/busybox --install -s /bin 2>/dev/null
export PATH=/bin HOME=/root LC_ALL=C.UTF-8 RUST_BACKTRACE=1
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
mount -t devpts devpts /dev/pts
mount -t debugfs debugfs /sys/kernel/debug 2>/dev/null
mount -t tracefs tracefs /sys/kernel/tracing 2>/dev/null
mount -t cgroup2 cgroup2 /sys/fs/cgroup 2>/dev/null
ip link set lo up
hostname guest
ulimit -c 0
cd /root

port() {
    for entry in /sys/class/virtio-ports/*; do
        if [ "$(cat "$entry/name" 2>/dev/null)" = "$1" ]; then echo "/dev/${entry##*/}"; fi
    done
}
# No process but the command holds the port of results.
results=$(port pcieipc.results)

finish() {
    {
        dmesg
        # An object counts as leaked when it is older than five seconds, nothing points at it, and it did not change since the scan before.
        if [ -w /sys/kernel/debug/kmemleak ]; then
            echo scan >/sys/kernel/debug/kmemleak
            sleep 6
            echo scan >/sys/kernel/debug/kmemleak
            cat /sys/kernel/debug/kmemleak
        fi
    } >"$(port pcieipc.kernel)"
    host "done" "$1"
    sync
    poweroff -f
}

while read -r module; do
    insmod "$module" || { echo "init: $module cannot be loaded"; finish 125; }
done </rig/stock-modules
mount -t configfs configfs /sys/kernel/config 2>/dev/null
if [ -f /modules/pcieipc.ko ]; then
    # shellcheck disable=SC2046 # each parameter is a word
    insmod /modules/pcieipc.ko $(cat /rig/parameters) || { echo "init: pcieipc.ko cannot be loaded"; finish 125; }
    # A udev rule does this on an installed system.
    if [ -e /dev/pcieipc ]; then chgrp pcieipc /dev/pcieipc; chmod 0660 /dev/pcieipc; fi
fi
sh /rig/command </dev/null >"$results" 2>&1
finish $?

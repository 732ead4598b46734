#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs in the guest: udev with our rule alone makes the nodes what they are on an installed system. The kernel makes them for root and the group root alone.

number=0
result() {
    number=$((number + 1))
    if [ "$1" = 0 ]; then echo "ok $number $2"; else
        echo "not ok $number $2"
        stat -c "%a %U %G %n" /dev/pcieipc* | sed 's/^/# /'
        failed=1
    fi
}
udevadm() { LD_LIBRARY_PATH=/udev/lib /udev/udevadm "$@"; }
all_are() { # MODE:OWNER:GROUP
    for node in /dev/pcieipc /dev/pcieipc[0-9]*; do
        [ "$(stat -c '%a:%U:%G' "$node")" = "$1" ] || return 1
    done
}
# As somebody who is in no group but this one.
opens() { # GROUP NODE
    su -s /bin/sh "$1" -c "exec 3<>$2" 2>/dev/null
}
failed=0
# The kernel with every check is a small one, which tells programs of no changes to files; udevd does not work without.
if [ ! -d /proc/sys/fs/inotify ]; then
    echo "1..1"
    echo "ok 1 udev_makes_the_nodes_what_the_rule_says # SKIP this kernel has no inotify"
    exit 0
fi
echo "1..7"
# What the machine's own start has done to the nodes is undone.
rmmod pcieipc
insmod /modules/pcieipc.ko
all_are 660:root:root
result $? without_udev_the_nodes_are_roots_alone
rmmod pcieipc

LD_LIBRARY_PATH=/udev/lib /udev/systemd-udevd --daemon
result $? udev_runs
insmod /modules/pcieipc.ko
udevadm settle --timeout=60
all_are 660:root:pcieipc
result $? with_the_rule_they_are_the_groups

first=$(echo /dev/pcieipc[0-9]*)
device=$(readlink -f "/sys/class/pcieipc/${first#/dev/}/device")
echo 1 >"$device/remove"
echo 1 >/sys/bus/pci/rescan
udevadm settle --timeout=60
second=$(echo /dev/pcieipc[0-9]*)
[ "$first" != "$second" ] && all_are 660:root:pcieipc
result $? so_is_that_of_an_endpoint_that_returns_under_a_new_id

echo "member:x:1001:$(grep ^pcieipc: /etc/group | cut -d : -f 3)::/:/bin/sh" >>/etc/passwd
echo "stranger:x:1002:1002::/:/bin/sh" >>/etc/passwd
echo "stranger:x:1002:" >>/etc/group
opens member /dev/pcieipc && opens member "$second"
result $? a_member_of_the_group_opens_them
! opens stranger /dev/pcieipc && ! opens stranger "$second"
result $? nobody_else_does
udevadm verify --no-style /etc/udev/rules.d/60-pcieipc.rules >/dev/null
result $? udev_finds_no_fault_with_the_rule
udevadm control --exit
exit $failed

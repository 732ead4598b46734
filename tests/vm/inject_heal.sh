#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# `pcieipc inject` and `pcieipc heal` in a guest with two endpoints behind a switch.

number=0
result() {
    number=$((number + 1))
    if [ "$1" = 0 ]; then echo "ok $number $2"; else
        echo "not ok $number $2"
        sed 's/^/# /' /tmp/out /tmp/err
    fi
}
promise() { # NAME EXIT-CODE WORDS COMMAND...
    name=$1 code=$2 words=$3
    shift 3
    "$@" >/tmp/out 2>/tmp/err
    got=$?
    sed 's/^/# /' /tmp/out
    [ $got = "$code" ] && cat /tmp/out /tmp/err | grep -qF -- "$words"
    result $? "$name"
}
# What info says of an endpoint, on one line; its links are objects of their own.
told() { pcieipc info --json | sed 's/"link[a-z_]*":{[^}]*}//g' | tr '{' '\n' | grep -F "\"$1\""; }
state() { told "$1" | grep -o '"state":"[a-z]*"' | cut -d '"' -f 4; }
lives() { # ADDRESS: waits until the module says so; a recovery takes the kernel a second, a busy host more
    tries=0
    until [ "$(state "$1")" = live ]; do
        tries=$((tries + 1))
        [ $tries -lt $((300 * ${PATIENCE:-1})) ] || return 1
        sleep 0.1
    done
}
generation() { told "$1" | grep -o '"generation":[0-9]*' | cut -d : -f 2; }
newer() { # ADDRESS GENERATION: waits for a later life
    tries=0
    until lives "$1" && [ "$(generation "$1")" -gt "$2" ]; do
        tries=$((tries + 1))
        [ $tries -lt $((300 * ${PATIENCE:-1})) ] || return 1
        sleep 0.1
    done
}

echo "1..15"
first=$(pcieipc info --json | grep -o '"address":"[^"]*"' | sed -n 1p | cut -d '"' -f 4)
second=$(pcieipc info --json | grep -o '"address":"[^"]*"' | sed -n 2p | cut -d '"' -f 4)
echo "# endpoints $first $second"
port=$(basename "$(dirname "$(readlink -f "/sys/bus/pci/devices/$first")")")

promise an_endpoint_that_works_passes_its_self_test_and_is_left_alone 0 "its interrupt came" pcieipc heal "$first"
promise a_correctable_error_is_counted_by_the_kernel 0 "the kernel counts 1, was 0" pcieipc inject correctable "$first"
before=$(generation "$first")
promise a_non_fatal_error_is_injected 0 "the kernel counts 1, was 0" pcieipc inject non-fatal "$first"
newer "$first" "$before"
result $? a_non_fatal_error_begins_a_new_life
before=$(generation "$first")
promise a_fatal_error_is_injected 0 "the kernel counts 1, was 0" pcieipc inject fatal "$first"
newer "$first" "$before"
result $? a_fatal_error_begins_a_new_life
promise a_port_of_another_driver_with_our_endpoints_only_may_be_hit 0 "would cause: remove" pcieipc inject remove "$port" --dry-run
virtio=$(basename "$(readlink -f /sys/bus/pci/drivers/virtio-pci/0000:* | head -n 1)")
promise an_endpoint_of_another_driver_is_refused 2 "belongs to the driver virtio-pci" pcieipc inject remove "$virtio"

promise a_removal_is_done 0 "remove: done" pcieipc inject remove "$second"
promise a_dry_run_of_heal_only_says_what_it_would_do 0 "would" pcieipc heal "$second" --dry-run
promise heal_brings_a_removed_endpoint_back 0 "its interrupt came" pcieipc heal "$second"

number_of() { [ "$1" = "$first" ] && echo 0 || echo 1; }
# A dead endpoint reads all-ones until its power is switched, which nobody but the hand at the slot can do.
host softdev "{\"cmd\":\"die\",\"endpoint\":$(number_of "$second")}" >/dev/null
promise heal_says_that_a_dead_endpoint_does_not_come_back 1 "the bus does not find it" pcieipc heal "$second" --timeout 2s
host softdev "{\"cmd\":\"revive\",\"endpoint\":$(number_of "$second")}" >/dev/null
promise heal_finds_it_when_its_power_is_back 0 "its interrupt came" pcieipc heal "$second"
# Silent: it answers, but nothing interrupts. A function reset does not help it, power does.
host softdev "{\"cmd\":\"silence\",\"endpoint\":$(number_of "$second")}" >/dev/null
promise the_self_test_sees_an_endpoint_that_does_not_interrupt 1 "no interrupt within" pcieipc heal "$second" --timeout 2s
host softdev "{\"cmd\":\"revive\",\"endpoint\":$(number_of "$second")}" >/dev/null
promise by_id_as_info_shows_it 0 "its interrupt came" pcieipc heal "$(told "$second" | grep -o '"id":[0-9]*' | cut -d : -f 2)"

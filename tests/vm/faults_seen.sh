#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs in the guest: does to an endpoint what the operators' table of docs/faults.md lists, and looks whether dmesg, watch and info show what is written
# there. Endpoint 0 of the server is the first of the bus.

# shellcheck disable=SC2317 # until_it calls functions by their names
number=0
result() {
    number=$((number + 1))
    if [ "$1" = 0 ]; then echo "ok $number $2"; else
        echo "not ok $number $2"
        since_dmesg | sed 's/^/# dmesg: /'
        since_watch | sed 's/^/# watch: /'
        told | sed 's/^/# info: /'
    fi
}
begin() { dmesg_lines=$(dmesg | wc -l) watch_lines=$(wc -l </tmp/watch) life=$(generation); }
since_dmesg() { dmesg | tail -n +$((dmesg_lines + 1)); }
since_watch() { tail -n +$((watch_lines + 1)) /tmp/watch; }
# What info says of the endpoint in its present life, on one line; its links are objects of their own.
told() { pcieipc info --json | sed 's/"link[a-z_]*":{[^}]*}//g' | tr '{' '\n' | grep -F "\"$first\"" | tail -n 1; }
state() { told | grep -o '"state":"[a-z]*"' | cut -d '"' -f 4; }
generation() { told | grep -o '"generation":[0-9]*' | cut -d : -f 2; }
until_it() { # SECONDS COMMAND...
    tries=$(($1 * 5 * ${PATIENCE:-1}))
    shift
    until "$@"; do
        tries=$((tries - 1))
        [ $tries -gt 0 ] || return 1
        sleep 0.2
    done
}
dmesg_has() { since_dmesg | grep -qE "$1"; }
watch_has() { since_watch | grep -qE "$1"; }
is() { [ "$(state)" = "$1" ]; }
lives_anew() { is live && [ "$(generation)" -gt "${life:-0}" ]; }
dmesg_says() { until_it "${3:-20}" dmesg_has "$2"; result $? "$1"; }
watch_says() { until_it 20 watch_has "$2"; result $? "$1"; }
becomes() { until_it "${3:-30}" "$2"; result $? "$1"; }
dead() { is dead; }
# Nothing in dmesg by the module or the error handling.
dmesg_is_silent() { ! dmesg_has "$first|AER|pcieipc"; result $? "$1"; }
watch_is_silent() { sleep 1; [ -z "$(since_watch)" ]; result $? "$1"; }
softdev() { host softdev "$1" >/dev/null; }
device=/sys/bus/pci/devices

echo "1..32"
first=$(pcieipc info --json | grep -o '"address":"[^"]*"' | sed -n 1p | cut -d '"' -f 4)
echo "# endpoint $first"
pcieipc watch --interval 0.2 >/tmp/watch 2>/tmp/watch.err &
watch=$!
begin
sleep 2

begin
pcieipc inject correctable "$first" >/dev/null
dmesg_says a_correctable_error_is_in_dmesg "AER: (Multiple )?Correctable Error message(s received, first one| received) from $first"
watch_says a_correctable_error_and_in_watch "correctable errors of $first"
[ "$(generation)" = "$life" ]; result $? a_correctable_error_and_the_endpoint_lives_on

begin
pcieipc inject non-fatal "$first" >/dev/null
dmesg_says a_non_fatal_error_is_in_dmesg "$first: error of severity 1 reported"
watch_says a_non_fatal_error_and_in_watch "non-fatal errors of $first: non-fatal CmpltTO 1"
becomes a_non_fatal_error_and_begins_a_new_life lives_anew

begin
pcieipc inject fatal "$first" >/dev/null
dmesg_says a_fatal_error_is_in_dmesg "$first: error of severity 2 reported"
watch_says a_fatal_error_and_in_watch "^fatal errors of $first: fatal Unknown 1"
becomes a_fatal_error_and_begins_a_new_life lives_anew

sleep 1; begin
echo 1 >"$device/$first"/reset
becomes a_reset_begins_a_new_life lives_anew
dmesg_is_silent a_reset_and_is_not_in_dmesg

begin
echo 1 >"$device/$first"/remove
watch_says a_removal_is_in_watch "$first.* was removed, generation [0-9]+ ended"
echo 1 >/sys/bus/pci/rescan
dmesg_says a_return_is_in_dmesg "$first: endpoint [0-9]+ \([0-9]+ vectors, generation [0-9]+\)"
watch_says a_return_and_in_watch "$first.* returned, generation [0-9]+"
becomes a_return_and_is_a_new_life lives_anew

sleep 1; begin
echo "$first" >/sys/bus/pci/drivers/pcieipc/unbind
watch_says an_unbind_is_in_watch "driver of $first: none \(was pcieipc\)"
dmesg_is_silent an_unbind_and_not_in_dmesg
echo "$first" >/sys/bus/pci/drivers/pcieipc/bind
becomes an_unbind_and_its_end_is_a_new_life lives_anew

sleep 1; begin
softdev '{"cmd":"link","endpoint":0,"speed":1,"width":1}'
watch_says a_worse_link_is_in_watch "link of $first: 2.5 GT/s x1 \(was 16 GT/s x16\)"
dmesg_is_silent a_worse_link_and_not_in_dmesg
softdev '{"cmd":"link","endpoint":0,"speed":4,"width":16}'
watch_says a_worse_link_and_so_is_its_return "link of $first: 16 GT/s x16 \(was 2.5 GT/s x1\)"

sleep 1; begin
softdev '{"cmd":"silence","endpoint":0}'
pcieipc heal "$first" --dry-run >/tmp/heal 2>&1
grep -q "no interrupt within" /tmp/heal; result $? silence_is_seen_by_the_self_test_of_heal
dmesg_is_silent silence_and_not_in_dmesg
watch_is_silent silence_and_not_in_watch
echo 1 >"$device/$first"/remove
softdev '{"cmd":"revive","endpoint":0}'
echo 1 >/sys/bus/pci/rescan
becomes silence_until_its_power_was_switched lives_anew

sleep 1; begin
softdev '{"cmd":"die","endpoint":0}'
dmesg_says a_death_is_in_dmesg "$first: does not answer; treated as removed unless it comes back within 2000 ms"
dmesg_says a_death_and_that_it_is_final "$first: no longer answers; treated as removed"
watch_says a_death_and_in_watch "$first fell off the bus: it answers all ones"
echo 1 >"$device/$first"/remove
softdev '{"cmd":"revive","endpoint":0}'
echo 1 >/sys/bus/pci/rescan
becomes a_death_until_its_power_was_switched lives_anew

sleep 1; begin
pcieipc inject fatal "$first" >/dev/null
softdev '{"cmd":"die","endpoint":0}'
dmesg_says a_recovery_that_failed_is_in_dmesg "device recovery failed" 120
becomes a_recovery_that_failed_and_leaves_the_endpoint_dead dead
echo 1 >"$device/$first"/remove
softdev '{"cmd":"revive","endpoint":0}'
echo 1 >/sys/bus/pci/rescan
becomes a_recovery_that_failed_until_it_was_removed_and_found_again lives_anew
kill $watch
cp /tmp/watch /tmp/watch.txt; host put /tmp/watch.txt
exit 0

#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs in the guest: does things to the tree and asks whether watch's log and doctor have seen them.

number=0
result() {
    number=$((number + 1))
    if [ "$1" = 0 ]; then echo "ok $number $2"; else echo "not ok $number $2"; tail -n 5 /tmp/watch.jsonl; fi
}
# Uptime in hundredths of a second.
now() { sed 's/ .*//; s/\.//' /proc/uptime; }
# Waits for a pattern in what the log got after line $1, and says how long it took since $2.
lines() { wc -l </tmp/watch.jsonl; }
seen_within_a_second() {
    name=$1 after=$2 start=$3 pattern=$4
    while :; do
        took=$(($(now) - start))
        if tail -n +$((after + 1)) /tmp/watch.jsonl | grep -q "$pattern"; then break; fi
        if [ "$took" -gt $((5 * limit)) ]; then break; fi
        sleep 0.02
    done
    echo "# $name took $took hundredths of a second"
    late=1
    if [ "$took" -le "$limit" ]; then late=0; fi
    result $late "$name"
}
# Asks doctor again and again from now on, in the background, until it has the finding $id (or, with "not", has it no more).
doctor_looks() {
    start=$1 wanted=$2 looks=0; shift 2
    while :; do
        looks=$((looks + 1))
        pcieipc doctor --sample 0 --json "$@" >/tmp/doctor.json
        if grep -q "\"id\": \"$id\"" /tmp/doctor.json; then found=yes; else found=not; fi
        took=$(($(now) - start))
        if [ "$found" = "$wanted" ] || { [ "$took" -gt $((5 * limit)) ] && [ "$looks" -ge 3 ]; }; then break; fi
    done
    echo "$found $took $looks" >/tmp/doctor.took
}
# What doctor_looks found: in time, or by its first looks where this machine is so busy that they took longer than that.
doctor_within_a_second() {
    wait "$doctor"
    read -r found took looks </tmp/doctor.took
    echo "# $1: $found after $took hundredths of a second and $looks looks"
    late=1
    if [ "$found" = "$2" ] && { [ "$took" -le "$limit" ] || { [ "$limit" -gt 100 ] && [ "$looks" -le 3 ]; }; }; then late=0; fi
    result $late "$1"
}
doctor_says() {
    name=$1; shift
    pcieipc doctor --sample 0 --json "$@" >/tmp/doctor.json
    grep -q "\"id\": \"$id\"" /tmp/doctor.json; result $? "$name"
}

echo "1..15"
endpoints=$(grep -l 0x120000 /sys/bus/pci/devices/*/class | sed 's|/class||; s|.*/||')
first=$(echo "$endpoints" | sed -n 1p)
second=$(echo "$endpoints" | sed -n 2p)
echo "# endpoints $first $second"
pcieipc topo --all
pcieipc snapshot --sample 0 /tmp/before.tar.gz
pcieipc watch --log /tmp/watch.jsonl --interval 0.3 &
watch=$!
i=0
while [ ! -s /tmp/watch.jsonl ] && [ "$i" -lt $((100 * ${PATIENCE:-1})) ]; do sleep 0.1; i=$((i + 1)); done
grep -q '"hears_kernel":true' /tmp/watch.jsonl; result $? watch_hears_the_kernel

# A second, unless this machine is so busy that one look alone takes longer than half of that.
start=$(now)
pcieipc doctor --sample 0 --json >/tmp/doctor.json
look=$(($(now) - start))
limit=100
if [ "$look" -gt 50 ]; then limit=$((3 * look)); fi
echo "# a doctor's look takes $look hundredths of a second here; seen in time means $limit"

after=$(lines) start=$(now)
host softdev '{"cmd":"link","endpoint":0,"speed":1,"width":4}' >/dev/null
id=link-speed-reduced; doctor_looks "$start" yes & doctor=$!
seen_within_a_second a_link_downgrade_is_seen_by_watch "$after" "$start" '"event":"link"'
doctor_within_a_second a_link_downgrade_is_seen_by_doctor yes
id=link-changed; doctor_says a_changed_link_is_seen_against_a_snapshot --since /tmp/before.tar.gz

# struct aer_error_inj: bus, device, function, padding; uncorrectable, correctable, four words of header, domain.
bus=$(printf '%03o' "0x$(echo "$second" | cut -d: -f2)")
# shellcheck disable=SC2059 # the bus is an escape inside the format
inject() { printf "\\$bus\\000\\000\\000\\000\\000\\000\\000\\100\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000" >/dev/aer_inject; }
after=$(lines) start=$(now)
i=0
while [ "$i" -lt 20 ]; do inject; i=$((i + 1)); done
id=aer-correctable; doctor_looks "$start" yes --since /tmp/before.tar.gz & doctor=$!
seen_within_a_second an_error_burst_is_seen_by_watch "$after" "$start" '"event":"errors".*BadTLP'
doctor_within_a_second an_error_burst_is_seen_by_doctor yes

after=$(lines) start=$(now)
echo 1 >/sys/bus/pci/devices/"$second"/remove
id=function-missing; doctor_looks "$start" yes --since /tmp/before.tar.gz & doctor=$!
seen_within_a_second a_removal_is_seen_by_watch "$after" "$start" "\"event\":\"removed\",\"address\":\"$second\""
doctor_within_a_second a_removal_is_seen_by_doctor yes
old=$(grep "\"event\":\"removed\",\"address\":\"$second\"" /tmp/watch.jsonl | sed 's/.*"generation":\([0-9]*\).*/\1/')
after=$(lines) start=$(now)
echo 1 >/sys/bus/pci/rescan
id=function-missing; doctor_looks "$start" not --since /tmp/before.tar.gz & doctor=$!
seen_within_a_second a_return_is_seen_by_watch "$after" "$start" "\"event\":\"returned\",\"address\":\"$second\""
new=$(grep "\"event\":\"returned\",\"address\":\"$second\"" /tmp/watch.jsonl | sed 's/.*"generation":\([0-9]*\).*/\1/')
newer=1
if [ "$new" -gt "$old" ]; then newer=0; fi
result $newer the_returned_card_has_a_new_generation
doctor_within_a_second a_return_is_seen_by_doctor not

after=$(lines) start=$(now)
host softdev '{"cmd":"die","endpoint":1}' >/dev/null
id=device-fallen-off; doctor_looks "$start" yes & doctor=$!
seen_within_a_second a_card_that_dies_is_seen_by_watch "$after" "$start" '"event":"fell-off"'
doctor_within_a_second a_card_that_dies_is_seen_by_doctor yes
after=$(lines) start=$(now)
host softdev '{"cmd":"revive","endpoint":1}' >/dev/null
id=device-fallen-off; doctor_looks "$start" not & doctor=$!
seen_within_a_second a_card_that_revives_is_seen_by_watch "$after" "$start" '"event":"answers"'
doctor_within_a_second a_card_that_revives_is_seen_by_doctor not
kill $watch
cp /tmp/watch.jsonl /tmp/kept.jsonl; host put /tmp/kept.jsonl
exit 0

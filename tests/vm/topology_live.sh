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
        if [ "$took" -gt 500 ]; then break; fi
        sleep 0.02
    done
    echo "# $name took 0.$(printf %02d "$took") s"
    late=1
    if [ "$took" -le 100 ]; then late=0; fi
    result $late "$name"
}
doctor_says() {
    name=$1; shift
    pcieipc doctor --sample 0 --json "$@" >/tmp/doctor.json
    grep -q "\"id\": \"$id\"" /tmp/doctor.json; result $? "$name"
}

echo "1..13"
endpoints=$(grep -l 0x120000 /sys/bus/pci/devices/*/class | sed 's|/class||; s|.*/||')
first=$(echo "$endpoints" | sed -n 1p)
second=$(echo "$endpoints" | sed -n 2p)
echo "# endpoints $first $second"
pcieipc topo --all
pcieipc snapshot --sample 0 /tmp/before.tar.gz
pcieipc watch --log /tmp/watch.jsonl --interval 0.3 &
watch=$!
i=0
while [ ! -s /tmp/watch.jsonl ] && [ "$i" -lt 100 ]; do sleep 0.1; i=$((i + 1)); done
grep -q '"hears_kernel":true' /tmp/watch.jsonl; result $? watch_hears_the_kernel

after=$(lines) start=$(now)
host softdev '{"cmd":"link","endpoint":0,"speed":1,"width":4}' >/dev/null
seen_within_a_second a_link_downgrade_is_seen_by_watch "$after" "$start" '"event":"link"'
id=link-speed-reduced; doctor_says a_link_downgrade_is_seen_by_doctor
id=link-changed; doctor_says a_changed_link_is_seen_against_a_snapshot --since /tmp/before.tar.gz

# struct aer_error_inj: bus, device, function, padding; uncorrectable, correctable, four words of header, domain.
bus=$(printf '%03o' "0x$(echo "$second" | cut -d: -f2)")
# shellcheck disable=SC2059 # the bus is an escape inside the format
inject() { printf "\\$bus\\000\\000\\000\\000\\000\\000\\000\\100\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000\\000" >/dev/aer_inject; }
after=$(lines) start=$(now)
i=0
while [ "$i" -lt 20 ]; do inject; i=$((i + 1)); done
seen_within_a_second an_error_burst_is_seen_by_watch "$after" "$start" '"event":"errors".*BadTLP'
id=aer-correctable; doctor_says an_error_burst_is_seen_by_doctor --since /tmp/before.tar.gz

after=$(lines) start=$(now)
echo 1 >/sys/bus/pci/devices/"$second"/remove
seen_within_a_second a_removal_is_seen_by_watch "$after" "$start" "\"event\":\"removed\",\"address\":\"$second\""
id=function-missing; doctor_says a_removal_is_seen_by_doctor --since /tmp/before.tar.gz
old=$(grep "\"event\":\"removed\",\"address\":\"$second\"" /tmp/watch.jsonl | sed 's/.*"generation":\([0-9]*\).*/\1/')
after=$(lines) start=$(now)
echo 1 >/sys/bus/pci/rescan
seen_within_a_second a_return_is_seen_by_watch "$after" "$start" "\"event\":\"returned\",\"address\":\"$second\""
new=$(grep "\"event\":\"returned\",\"address\":\"$second\"" /tmp/watch.jsonl | sed 's/.*"generation":\([0-9]*\).*/\1/')
newer=1
if [ "$new" -gt "$old" ]; then newer=0; fi
result $newer the_returned_card_has_a_new_generation

after=$(lines) start=$(now)
host softdev '{"cmd":"die","endpoint":1}' >/dev/null
seen_within_a_second a_card_that_dies_is_seen_by_watch "$after" "$start" '"event":"fell-off"'
id=device-fallen-off; doctor_says a_card_that_dies_is_seen_by_doctor
after=$(lines) start=$(now)
host softdev '{"cmd":"revive","endpoint":1}' >/dev/null
seen_within_a_second a_card_that_revives_is_seen_by_watch "$after" "$start" '"event":"answers"'
kill $watch
cp /tmp/watch.jsonl /tmp/kept.jsonl; host put /tmp/kept.jsonl
exit 0

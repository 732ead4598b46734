#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs in the guest: endpoints of the module carry a collective by their engines while one watch logs and another draws its screen, then one
# endpoint is removed and comes back.

number=0
result() {
    number=$((number + 1))
    if [ "$1" = 0 ]; then echo "ok $number $2"; else
        echo "not ok $number $2"
        tail -n 4 /tmp/watch.jsonl | sed 's/^/# /'
    fi
}
patience=${PATIENCE:-1}
# Waits up to 5 s for a line of the log, after line $2, that matches.
logged() { # NAME AFTER PATTERN
    i=0
    until tail -n +$(($2 + 1)) /tmp/watch.jsonl | grep -qE "$3" || [ "$i" -gt $((100 * patience)) ]; do sleep 0.05; i=$((i + 1)); done
    tail -n +$(($2 + 1)) /tmp/watch.jsonl | grep -qE "$3"; result $? "$1"
}
lines() { wc -l </tmp/watch.jsonl; }
# The module's generation of the first endpoint, as the log has it last.
generation() { grep -o "\"address\":\"$first\"[^}]*\"state\"" /tmp/watch.jsonl | tail -n 1 | grep -o '"generation":[0-9]*' | cut -d : -f 2; }
# The screen draws only what changed, and all of it when its terminal changes its size. Then its words, in their order, hold a match within 5 s.
rows=50
screen() { # NAME PATTERN
    i=0 seen=1
    while [ "$seen" != 0 ] && [ "$i" -lt $((10 * patience)) ]; do
        i=$((i + 1)) rows=$((101 - rows))
        from=$(($(wc -c </tmp/screen) + 1))
        stty -F "$(cat /tmp/terminal)" rows $rows cols 170
        sleep 0.5
        tail -c +"$from" /tmp/screen | sed "s/$escape\[[0-9;]*H/ /g; s/$escape\[[0-9;?]*[A-Za-z]//g" >/tmp/words
        grep -qE "$2" /tmp/words; seen=$?
    done
    result $seen "$1"
    [ "$seen" = 0 ] || cut -c 1-3000 /tmp/words | sed 's/^/# /'
}
metric() { grep -E "^$1" /tmp/watch.prom | awk '{ if ($2 > 0) n++ } END { exit !(n >= 2) }'; }

echo "1..16"
first=$(pcieipc info --json | grep -o '"address":"[^"]*"' | head -n 1 | cut -d '"' -f 4)
pcieipc watch --log /tmp/watch.jsonl --prometheus /tmp/watch.prom --interval 0.2 &
watch=$!
i=0
while [ ! -s /tmp/watch.jsonl ] && [ "$i" -lt $((100 * patience)) ]; do sleep 0.1; i=$((i + 1)); done
escape=$(printf '\033')
mkfifo /tmp/keys
script -qefc 'tty >/tmp/terminal; stty rows 50 cols 170; exec pcieipc watch --interval 0.3' /tmp/screen </tmp/keys >/tmp/script 2>&1 &
drawn=$!
exec 3>/tmp/keys
i=0
while [ ! -s /tmp/screen ] && [ "$i" -lt $((100 * patience)) ]; do sleep 0.1; i=$((i + 1)); done
screen the_screen_shows_tree_cards_and_live_endpoints "PCIe +tree.*$first.*cards:.*$first.*endpoints +of +the +module.*$first +live .*events"
logged free_endpoints_are_live_and_carry_nothing 0 '"attached":false,.*"channels":0,.*"state":"live"'

after=$(lines)
pcieipc bench --ranks 2 --transport kmod --mover engine --min 64K --max 64K --time $((4 * patience))s >/tmp/bench 2>&1 &
bench=$!
logged endpoints_in_use_show_session_and_channels "$after" '"attached":true,[^}]*"channels":[1-9]'
logged their_engines_throughput_is_logged "$after" '"dma_bytes_per_second":[1-9]'
screen it_shows_who_is_attached_and_what_engines_move "$first +live +[0-9]+ +yes +[1-9][0-9]* +[0-9]+ +([1-9]|0\.[1-9])"
metric pcieipc_endpoint_channels; result $? channels_are_in_the_metrics
metric pcieipc_endpoint_dma_bytes_total; result $? moved_bytes_are_in_the_metrics
wait $bench; code=$?; result $code the_collective_was_right_meanwhile
[ $code = 0 ] || tail -n 10 /tmp/bench | sed "s/^/# /"
after=$(lines)
logged endpoints_that_are_free_again_show_it "$after" '"attached":false,[^}]*"channels":0'

after=$(lines)
before=$(generation)
echo 1 >"/sys/bus/pci/devices/$first/remove"
logged a_removed_endpoint_is_logged "$after" "\"event\":\"removed\",\"address\":\"$first\""
screen the_screen_tells_of_the_removal "$first.*was +removed"
after=$(lines)
echo 1 >/sys/bus/pci/rescan
logged it_is_live_again_when_it_is_back "$after" "\"address\":\"$first\"[^}]*\"state\":\"live\""
now=$(generation)
echo "# generation $before, then $now"
newer=1
if [ "$now" -gt "$before" ]; then newer=0; fi
result $newer in_a_newer_generation
screen and_of_the_return "$first.* returned, +generation"
printf q >&3
wait $drawn; result $? a_key_ends_it
tail -c 200 /tmp/screen | grep -qF "${escape}[?1049l"; result $? and_the_terminal_is_as_it_was
kill $watch
cp /tmp/watch.jsonl /tmp/kept.jsonl; host put /tmp/kept.jsonl
exit 0

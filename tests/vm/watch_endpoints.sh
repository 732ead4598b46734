#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# Runs in the guest: endpoints of the module carry a collective by their engines while watch logs, then one of them is removed and comes back.

number=0
result() {
    number=$((number + 1))
    if [ "$1" = 0 ]; then echo "ok $number $2"; else
        echo "not ok $number $2"
        tail -n 4 /tmp/watch.jsonl | sed 's/^/# /'
    fi
}
# Waits up to 5 s for a line of the log, after line $2, that matches.
logged() { # NAME AFTER PATTERN
    i=0
    until tail -n +$(($2 + 1)) /tmp/watch.jsonl | grep -qE "$3" || [ "$i" -gt 100 ]; do sleep 0.05; i=$((i + 1)); done
    tail -n +$(($2 + 1)) /tmp/watch.jsonl | grep -qE "$3"; result $? "$1"
}
lines() { wc -l </tmp/watch.jsonl; }
# The module's generation of the first endpoint, as the log has it last.
generation() { grep -o "\"address\":\"$first\"[^}]*\"state\"" /tmp/watch.jsonl | tail -n 1 | grep -o '"generation":[0-9]*' | cut -d : -f 2; }
metric() { grep -E "^$1" /tmp/watch.prom | awk '{ if ($2 > 0) n++ } END { exit !(n >= 2) }'; }

echo "1..10"
first=$(pcieipc info --json | grep -o '"address":"[^"]*"' | head -n 1 | cut -d '"' -f 4)
pcieipc watch --log /tmp/watch.jsonl --prometheus /tmp/watch.prom --interval 0.2 &
watch=$!
i=0
while [ ! -s /tmp/watch.jsonl ] && [ "$i" -lt 100 ]; do sleep 0.1; i=$((i + 1)); done
logged free_endpoints_are_live_and_carry_nothing 0 '"attached":false,.*"channels":0,.*"state":"live"'

after=$(lines)
pcieipc bench --ranks 2 --transport kmod --mover engine --min 64K --max 64K --time 1s >/tmp/bench 2>&1 &
bench=$!
logged endpoints_in_use_show_session_and_channels "$after" '"attached":true,[^}]*"channels":[1-9]'
logged their_engines_throughput_is_logged "$after" '"dma_bytes_per_second":[1-9]'
metric pcieipc_endpoint_channels; result $? channels_are_in_the_metrics
metric pcieipc_endpoint_dma_bytes_total; result $? moved_bytes_are_in_the_metrics
wait $bench; result $? the_collective_was_right_meanwhile
after=$(lines)
logged endpoints_that_are_free_again_show_it "$after" '"attached":false,[^}]*"channels":0'

after=$(lines)
before=$(generation)
echo 1 >"/sys/bus/pci/devices/$first/remove"
logged a_removed_endpoint_is_logged "$after" "\"event\":\"removed\",\"address\":\"$first\""
after=$(lines)
echo 1 >/sys/bus/pci/rescan
logged it_is_live_again_when_it_is_back "$after" "\"address\":\"$first\"[^}]*\"state\":\"live\""
now=$(generation)
echo "# generation $before, then $now"
newer=1
if [ "$now" -gt "$before" ]; then newer=0; fi
result $newer in_a_newer_generation
kill $watch
cp /tmp/watch.jsonl /tmp/kept.jsonl; host put /tmp/kept.jsonl
exit 0

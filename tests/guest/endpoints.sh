#!/bin/busybox sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# endpoints.sh COUNT: what the kernel and lspci find of the soft endpoints, without any driver.
count=$1
number=1
failed=0
promise() { # NAME COMMAND: the promise is kept if the command succeeds
    if eval "$2"; then echo "ok $number $1"; else echo "not ok $number $1"; failed=1; fi
    number=$((number + 1))
}
# shellcheck disable=SC2317 # promises call it
playing() { # FIELD ENDPOINT: what the server says of it
    host softdev '{"cmd":"list"}' | tr '{' '\n' | grep "\"endpoint\":$2," | grep -o "\"$1\":[^,}]*" | cut -d: -f2
}
function_of() { # ENDPOINT: its PCI address, by its serial number
    for device in /sys/bus/pci/devices/*; do
        [ "$(cat "$device/device")" = 0x7069 ] || continue
        low=$(setpci -s "${device##*/}" 154.l)
        [ $((0x$low)) != $((1 + $1)) ] || echo "${device##*/}"
    done
}
# shellcheck disable=SC2317
is() { # SLOT PATTERN: lspci shows it
    grep -q "$2" "/tmp/$1"
}

echo "1..$((count * 4 + 5))"
echo "# $(lspci -d 1234:7069 | wc -l) endpoints"
promise every_endpoint_is_on_the_bus "[ \$(lspci -n -d 1234:7069 | grep -c 1200) = $count ]"
endpoint=0
while [ $endpoint -lt "$count" ]; do
    slot=$(function_of $endpoint)
    lspci -vvv -s "$slot" >"/tmp/$slot" 2>/dev/null
    promise "endpoint_${endpoint}_has_its_bars" \
        "is $slot 'Region 0: Memory.*32-bit, non-pref.*16K' && is $slot 'Region 2: Memory.*64-bit, pref.*4M' && is $slot 'Region 4: Memory.*4K'"
    promise "endpoint_${endpoint}_has_its_capabilities" \
        "is $slot 'Express (v2) Endpoint' && is $slot 'MSI-X: Enable- Count=8' && is $slot 'Power Management version 3' &&
         is $slot 'Advanced Error Reporting' && is $slot 'FLReset+' && is $slot 'Device Serial Number 70-69-00-00-00-00-00-0'"
    promise "endpoint_${endpoint}_shows_its_best_link" "is $slot 'LnkSta:.Speed 16GT/s, Width x16'"
    # Peers reach each other by these addresses, so the server must know what the kernel assigned.
    assigned=$(head -n 1 "/sys/bus/pci/devices/$slot/resource" | cut -d' ' -f1)
    setpci -s "$slot" 4.w=2:2
    promise "endpoint_${endpoint}_knows_its_bus_address" "[ $((assigned)) = \$(playing bar0 $endpoint) ]"
    endpoint=$((endpoint + 1))
done

slot=$(function_of 1)
other=$(function_of 0)
host softdev '{"cmd":"link","endpoint":1,"speed":1,"width":1}' >/dev/null
lspci -vvv -s "$slot" >"/tmp/$slot" 2>/dev/null
promise a_worse_link_is_downgraded_in_lspci "is $slot 'LnkSta:.*2.5GT/s (downgraded), Width x1 (downgraded)'"
host softdev '{"cmd":"die","endpoint":1}' >/dev/null
promise a_dead_endpoint_reads_all_ones \
    "[ \$(setpci -s $slot 0.l) = ffffffff ] && [ \$(setpci -s $slot 154.l) = ffffffff ] && [ \$(bar_word $slot 0) = 0xFFFFFFFF ]"
promise its_sibling_lives "[ \$(setpci -s $other 0.l) = 70691234 ]"
host softdev '{"cmd":"revive","endpoint":1}' >/dev/null
echo 1 >"/sys/bus/pci/devices/$slot/remove"
echo 1 >/sys/bus/pci/rescan
setpci -s "$slot" 4.w=2:2
magic=$(bar_word "$slot" 0)
promise it_comes_back_by_removal_and_rescan "[ \$(setpci -s $slot 0.l) = 70691234 ] && [ $magic = 0x43504950 ]"
exit $failed

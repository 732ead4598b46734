#!/bin/sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# The command against the real module, in a guest with four endpoints: sums that are right, and each refusal with its exit code and its words.

number=0
verdict() { # NAME CODE: CODE 0 is a kept promise
    number=$((number + 1))
    if [ "$2" = 0 ]; then echo "ok $number $1"; else
        echo "not ok $number $1"
        sed 's/^/# /' /tmp/out /tmp/err
    fi
}
promise() { # NAME EXIT-CODE WORDS COMMAND...: the command ends with that code and says the words on either stream
    name=$1 code=$2 words=$3
    shift 3
    "$@" >/tmp/out 2>/tmp/err
    got=$?
    if [ $got = "$code" ] && cat /tmp/out /tmp/err | grep -qF -- "$words"; then verdict "$name" 0; else
        echo "# exit code $got, not $code, or without: $words"
        verdict "$name" 1
    fi
}
reduce() {
    rm -f /tmp/sum.safetensors
    pcieipc reduce --input '/data/grads.{rank}.safetensors' --output /tmp/sum.safetensors --timeout $((20 * ${PATIENCE:-1}))s "$@"
}
nothing_written() {
    if find /tmp -maxdepth 1 \( -name '*sum.safetensors*' -o -name '*partial*' \) | grep -q .; then verdict "$1" 1; else verdict "$1" 0; fi
}
user() { /bin/setpriv --reuid 1000 --regid 1000 --clear-groups --bounding-set -all "$@"; }
first=$(pcieipc info --json | grep -o '"address":"[^"]*"' | head -n 1 | cut -d '"' -f 4)

echo "1..21"
promise info_lists_free_live_endpoints 0 "$first" pcieipc info
promise four_ranks_over_rings_give_the_float64_sum 0 '"wrong":0' reduce --ranks 4 --transport kmod --check --json
promise auto_takes_the_module_and_says_why 0 "transport: kmod (/dev/pcieipc has a free endpoint for every rank)" reduce --ranks 4 --check
promise the_ring_algorithm_is_right_too 0 '"wrong":0' reduce --ranks 3 --transport kmod --algorithm ring --check --json
promise bf16_is_rounded_once 0 '"wrong":0' pcieipc reduce --ranks 4 --input '/data/grads-bf16.{rank}.safetensors' --output /tmp/sum16 --check --json
promise engines_carry_the_records 0 '"wrong":0' reduce --ranks 4 --transport kmod --mover engine --check --json
# Counted by the endpoints' engines, not by the command.
pcieipc info --json >/tmp/out
grep -o '"dma_bytes":[0-9]*' /tmp/out | cut -d : -f 2 | awk '{ if ($1 > 0) n++ } END { exit n != 4 }'
verdict every_engine_moved_bytes $?
host softdev '{"cmd":"list"}' >/tmp/err
moved() { grep -o '"dma_bytes":[0-9]*' "$1" | sort; }
[ "$(moved /tmp/out)" = "$(moved /tmp/err)" ]
verdict the_endpoints_registers_and_the_module_count_the_same_bytes $?

promise auto_without_enough_endpoints_takes_shared_memory 0 "transport: shm (5 ranks need 5 free live endpoints, there are 4" \
    sh -c 'cp /data/grads.0.safetensors /data/grads.4.safetensors; pcieipc reduce --ranks 5 --input "/data/grads.{rank}.safetensors" --output /tmp/sum5 --check'
promise kmod_without_enough_endpoints_is_refused 1 "5 ranks need 5 free live endpoints, there are 4" reduce --ranks 5 --transport kmod
nothing_written a_refused_run_writes_nothing
promise a_second_session_on_an_endpoint_is_refused 1 "is taken" reduce --ranks 2 --transport kmod --endpoints "$first,$first"
nothing_written a_run_without_its_endpoint_writes_nothing
promise an_endpoint_that_is_not_there_is_refused 1 "there is no endpoint 0000:7f:00.0" reduce --ranks 2 --transport kmod --endpoints "$first,0000:7f:00.0"

promise no_permission_on_the_node_says_who_may 1 "no permission to open /dev/pcieipc" user pcieipc info
chmod 0666 /dev/pcieipc
promise too_little_memlock_names_the_limit 1 "the limit of locked memory is 64 KiB" \
    sh -c 'ulimit -l 64; mkdir -p /tmp/u; chown 1000 /tmp/u; cd /tmp/u; TMPDIR=/tmp/u exec /bin/setpriv --reuid 1000 --regid 1000 --clear-groups --bounding-set -all \
    pcieipc reduce --ranks 2 --transport kmod --input "/data/grads.{rank}.safetensors" --output sum --timeout 5s'
if find /tmp/u -mindepth 1 | grep -q .; then verdict too_little_memlock_writes_nothing 1; else verdict too_little_memlock_writes_nothing 0; fi

for device in /sys/bus/pci/drivers/pcieipc/0000:*; do basename "$device" >/sys/bus/pci/drivers/pcieipc/unbind; done
promise without_endpoints_info_says_how_to_bind_one 0 "no endpoint: none is bound" pcieipc info
promise without_endpoints_kmod_is_refused 1 "no endpoint is bound" reduce --ranks 2 --transport kmod
rmmod pcieipc
promise without_the_module_info_says_how_to_load_it 1 "load the module" pcieipc info
promise without_the_module_kmod_is_refused 1 "load the module" reduce --ranks 2 --transport kmod

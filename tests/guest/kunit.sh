#!/bin/busybox sh
# SPDX-License-Identifier: MIT OR Apache-2.0
# Reads what KUnit says of each suite that stands in the module's source. A suite that did not run is a failure, too.
number=0
suites=$(sed -n 's/.*kunit_tests(\([a-z_]*\)).*/\1/p' /kmod/*.rs /kmod/*/*.rs)
if [ ! -d /sys/kernel/debug/kunit ]; then
    echo "ok 1 the_modules_suites_pass # SKIP this kernel has no KUnit"
    echo "1..1"
    exit
fi
for suite in $suites; do
    results=/sys/kernel/debug/kunit/$suite/results
    if [ ! -f "$results" ] || ! grep -qE '^ *ok [0-9]+ ' "$results"; then
        number=$((number + 1))
        echo "not ok $number $suite::ran"
        continue
    fi
    # Cases are indented, the suite's own line is not.
    sed -nE 's/^ +(not ok|ok) [0-9]+ ([a-z0-9_]+).*/\2 \1/p' "$results" >/tmp/cases
    while read -r name outcome; do
        number=$((number + 1))
        echo "$outcome $number $suite::$name"
    done </tmp/cases
done
echo "1..$number"

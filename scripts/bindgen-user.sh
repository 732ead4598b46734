#!/bin/bash
# SPDX-License-Identifier: MIT OR Apache-2.0
# bindgen-user.sh [--check]: makes the library's bindings from uapi/pcieipc.h, or says whether those that are checked in
# are what would be made now.
. "$(dirname "${BASH_SOURCE[0]}")/steps.sh"

bindings=$REPO/userlib/pcieipc/src/abi/bindings.rs
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# bindgen does not expand _IO(), so the numbers of the calls become values of an enumeration.
{
    echo '#include "pcieipc.h"'
    echo 'enum pcieipc_call {'
    sed -n 's/^#define PCIEIPC_IOCTL_\([A-Z_]*\)[[:space:]].*/PCIEIPC_CALL_\1 = PCIEIPC_IOCTL_\1,/p' "$REPO/uapi/pcieipc.h"
    echo '};'
} >"$work/view.h"
{
    echo '// SPDX-License-Identifier: MIT OR Apache-2.0'
    "$REPO/scripts/in-env" --cwd "$work" bindgen view.h --use-core --ctypes-prefix ::core::ffi --with-derive-default \
        --no-doc-comments --default-enum-style consts --allowlist-item '^(pcieipc|PCIEIPC).*' \
        -- -I"$REPO/uapi" -I/usr/include/x86_64-linux-gnu
} >"$work/bindings.rs"
if [ "${1:-}" = --check ]; then
    diff -u "$bindings" "$work/bindings.rs" >&2 || die "the library's bindings are not those of uapi/pcieipc.h: run scripts/bindgen-user.sh"
else
    mkdir -p "$(dirname "$bindings")"
    cp "$work/bindings.rs" "$bindings"
fi

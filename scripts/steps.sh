# SPDX-License-Identifier: MIT OR Apache-2.0
# shellcheck shell=bash
# Sourced by the scripts that make the environment: where its parts are kept, and how a part is made once.

set -euo pipefail

# Debian's maintained kernels that have every Rust abstraction the module uses, and the one that was tested.
# shellcheck disable=SC2034
SUITE=trixie KERNEL_SERIES=7.3 KERNEL_TESTED=7.3.4+deb13-amd64

REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export REPO
export PCIEIPC_CACHE=${PCIEIPC_CACHE:-$HOME/.cache/pcieipc}

say() { printf '%s %s\n' "[$(basename "$0")]" "$*" >&2; }
die() { say "$*"; exit 1; }

# key FILE-OR-TEXT...: a short name for what a part depends on; comments and blank lines do not count.
key() {
    local item
    for item; do
        if [ -f "$item" ]; then sed -E '/^[[:space:]]*(#|$)/d' "$item"; else printf '%s\n' "$item"; fi
    done | sha256sum | cut -c1-12
}

# step TITLE DESTINATION COMMAND...: unless DESTINATION exists, runs COMMAND with a temporary name as its last argument
# and renames that to DESTINATION when it succeeded, so that an interrupted step leaves nothing that looks complete. Who comes while
# another makes the same waits for it.
step() {
    local title=$1 destination=$2 started=$SECONDS log code
    shift 2
    [ ! -e "$destination" ] || return 0
    log=$PCIEIPC_CACHE/logs/$(basename "$destination").log
    mkdir -p "$(dirname "$destination")" "$PCIEIPC_CACHE/logs"
    exec 8>"$log.lock"
    if ! flock -n 8; then
        say "$title: another run makes it; waiting for that"
        flock -w 3600 8 || die "$title: the other run did not end within an hour"
    fi
    if [ -e "$destination" ]; then
        exec 8>&-
        return 0
    fi
    say "$title ..."
    rm -rf "$destination.part"
    # In a condition, a function's commands would fail unheeded.
    set +e
    (set -e; "$@" "$destination.part") >"$log" 2>&1 8>&- 9>&-
    code=$?
    set -e
    if [ "$code" != 0 ]; then
        tail -n 25 "$log" >&2
        die "$title failed after $((SECONDS - started)) s; the whole log is $log"
    fi
    mv -T "$destination.part" "$destination"
    exec 8>&-
    say "$title: $((SECONDS - started)) s"
}

# link TARGET NAME: makes $PCIEIPC_CACHE/current/NAME point at TARGET in one step; relatively, so that the cache can be moved.
link() {
    local target=$1
    mkdir -p "$PCIEIPC_CACHE/current"
    [ "$target" = / ] || target=$(realpath --no-symlinks --relative-to="$PCIEIPC_CACHE/current" "$target")
    ln -sfn "$target" "$PCIEIPC_CACHE/current/.$2.part"
    mv -T "$PCIEIPC_CACHE/current/.$2.part" "$PCIEIPC_CACHE/current/$2"
}

# host_mirror SUFFIX: where this host takes its own Debian from, or with -security its security updates; nothing when apt's
# sources name no such place.
host_mirror() {
    local release
    # shellcheck disable=SC1091
    release=$(. /etc/os-release && echo "${VERSION_CODENAME:-}")$1
    # shellcheck disable=SC2016 # apt's own variables
    apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
        awk -v release="$release" '$2 == release && $3 == "main" && $1 ~ /^https?:/ && !seen++ { sub("/$", "", $1); print $1 }'
}

# debian_mirror: a mirror carries all releases, so the environment comes from the host's; PCIEIPC_MIRROR names another.
debian_mirror() {
    local uri=${PCIEIPC_MIRROR:-}
    [ -n "$uri" ] || uri=$(host_mirror '')
    [ -n "$uri" ] || die "apt's sources name no Debian mirror: set PCIEIPC_MIRROR to one"
    echo "${uri%/}"
}

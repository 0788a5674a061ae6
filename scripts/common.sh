# Sourced by the other scripts: where things are, and how they speak.
# shellcheck shell=bash disable=SC2034
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TARGET=$ROOT/target
CARGO_OUT=${CARGO_TARGET_DIR:-$TARGET}
MODULE=ngx_http_kvc_aware_module
export LC_ALL=C.UTF-8
# Ours to read only: nginx takes it for a list of sockets that it inherits.
export -n NGINX

command -v cargo >/dev/null || PATH=$PATH:${CARGO_HOME:-$HOME/.cargo}/bin

say() { printf '== %s\n' "$*" >&2; }
die() { printf '%s: %s\n' "${0##*/}" "$*" >&2; exit 1; }

# Installs a file by rename: a running nginx keeps the one that it has mapped.
install_file() {
    mkdir -p "$(dirname "$2")"
    cp "$1" "$2.$$" && mv -f "$2.$$" "$2"
}

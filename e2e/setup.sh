#!/usr/bin/env bash
# Prepare a bare Debian 12 machine for `make`: Python 3.11 with venv, uv (in the cache), and the development environment
# in .venv. Idempotent: a second run with nothing changed takes no time.
set -euo pipefail
cd "$(dirname "$0")/.."
cache="${BIDIKV_CACHE:-$HOME/.cache/bidikv}"
uv="$cache/tools/bin/uv"
uv_version=0.13.9
python=/usr/bin/python3
export UV_SYSTEM_CERTS=1 UV_LINK_MODE="${UV_LINK_MODE:-hardlink}"

say() { echo "[setup] $*"; }

if ! "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        say "CPython 3.11 with venv is needed at $python: install it (Debian 12: apt-get install python3 python3-venv)" >&2
        exit 1
    fi
    say "installing python3 and python3-venv ..."
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -q && apt-get install -y -q --no-install-recommends python3 python3-venv; } >/dev/null
fi

if [ "$("$uv" --version 2>/dev/null | cut -d' ' -f2)" != "$uv_version" ]; then
    say "installing uv $uv_version into $cache/tools ..."
    "$python" -m venv --clear "$cache/tools"
    "$cache/tools/bin/pip" install -q "uv==$uv_version"
fi

key=$(cat pyproject.toml constraints.txt "$0" | sha256sum | cut -c1-16)
if [ "$(cat .venv/.key 2>/dev/null)" != "$key" ]; then
    say "installing the development environment into .venv ..."
    "$uv" venv -q --clear --python "$python" .venv
    "$uv" pip install -q --python .venv/bin/python -r constraints.txt
    "$uv" pip install -q --python .venv/bin/python --no-deps --editable .
    echo "$key" >.venv/.key
fi

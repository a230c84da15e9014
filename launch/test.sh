#!/usr/bin/env bash
# Runs the tests, on the CPU.
#
#   ./launch/test.sh [pytest arguments]
#   ./launch/test.sh tests/plan -k table -n 0
#
# Sets itself up first (see setup.sh for its environment variables). Paths are taken from the repository's root.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/launch/setup.sh"

cd "$root"
export JAX_PLATFORMS=cpu
exec .venv/bin/python -m pytest -n 2 --dist loadfile "$@"

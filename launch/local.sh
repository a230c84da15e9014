#!/usr/bin/env bash
# Samples a real language model plainly and speculatively, side by side, on this machine.
#
#   ./launch/local.sh [flags of experiments/quickstart.py]
#   ./launch/local.sh --help
#
# Sets itself up first (see setup.sh for its environment variables). Relative paths in flags are taken from the folder
# it is called in; results go to experiments/results/quickstart.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/launch/setup.sh"

# PYTHONSAFEPATH: a folder named `experiments` or `jax` where the caller stands must not be imported instead of ours.
export PYTHONSAFEPATH=1 PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$root/.venv/bin/python" -m experiments.quickstart --config="$root/configs/quickstart.py" "$@"

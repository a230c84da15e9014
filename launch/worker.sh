#!/usr/bin/env bash
# Runs an experiment on this machine: alone, or as one process of several that a cluster's launcher starts on each.
#
#   ./launch/worker.sh EXPERIMENT [flags of experiments/EXPERIMENT.py]
#   ./launch/worker.sh quickstart --config.gamma=4
#
# Sets itself up first (see setup.sh for its environment variables). Without --config the settings are those of
# configs/EXPERIMENT.py; relative paths in flags are taken from the repository's root. Results go to
# experiments/results/EXPERIMENT.
#
# Environment: SPECJAX_RESULTS is another folder for results. SPECJAX_PROCESSES ("auto" on TPU VMs, GKE and under
# Slurm), SPECJAX_PROCESS, SPECJAX_HEARTBEAT and JAX_COORDINATOR_ADDRESS tell of other processes: see
# experiments/processes.py.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$root/launch/common.sh"

[[ ${1:-} != --help ]] || { help; exit; }
require_experiment "${1:-}"
experiment=$1
shift
"$root/launch/setup.sh"

cd "$root"
config=(--config="configs/$experiment.py")
for flag in "$@"; do
  [[ $flag != --config && $flag != --config=* ]] || config=()
done
exec .venv/bin/python -m "experiments.$experiment" ${config[@]+"${config[@]}"} "$@"

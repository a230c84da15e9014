#!/usr/bin/env bash
# Runs an experiment on the GPUs of a Slurm cluster: one process a GPU, results in this clone, which all nodes must see.
#
#   ./launch/slurm.sh [flags] EXPERIMENT [flags of experiments/EXPERIMENT.py]
#   ./launch/slurm.sh --nodes=2 --gpus=8 --sbatch-flag=--partition=a100 quickstart --config.gamma=4
#   ./launch/slurm.sh --list
#   ./launch/slurm.sh --logs --name=NAME      follows the log of the last job of that name
#   ./launch/slurm.sh --delete --name=NAME    cancels the jobs of that name
#
#   --name         of the job (default: specjax-EXPERIMENT)
#   --nodes        default: 1
#   --gpus         of each node (default: 1)
#   --time         limit, such as 4:00:00 (default: the partition's)
#   --sbatch-flag  a further flag for sbatch, such as --sbatch-flag=--account=NAME; repeat it
#   --dry-run      prints the commands in place of running them
#
# Sets itself up first, on this machine, with SPECJAX_JAX (default here: "jax[cuda13]"). A job that is pre-empted is put
# in the queue again and goes on with the items that were finished. It returns once the job is submitted.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$root/launch/common.sh"

action=run job='' nodes=1 gpus=1 time='' dry_run='' sbatch_flags=()
while [[ ${1:-} == -* ]]; do
  case $1 in
    --help) help; exit ;;
    --name | --name=*) job=$(value_of "$1") ;;
    --nodes | --nodes=*) nodes=$(value_of "$1") ;;
    --gpus | --gpus=*) gpus=$(value_of "$1") ;;
    --time | --time=*) time=$(value_of "$1") ;;
    --sbatch-flag | --sbatch-flag=*) sbatch_flags+=("$(value_of "$1")") ;;
    --dry-run) dry_run=1 ;;
    --list | --logs | --delete)
      [[ $action == run ]] || fail "--$action and $1 are two things to do: one at a time."
      action=${1#--}
      ;;
    *) fail "unknown flag $1. See --help. Flags of the experiment come behind its name." ;;
  esac
  shift
done

logs=$root/experiments/results/slurm
if [[ $action != run ]]; then
  [[ $# == 0 ]] || fail "--$action takes no experiment, got: $(quoted "$@")."
  [[ $action == list || -n $job ]] || fail "--name=NAME is missing."
else
  require_experiment "${1:-}"
  require_own_flags_first "$@"
  job=${job:-specjax-$1}
  whole_number --nodes "$nodes"
  whole_number --gpus "$gpus"
fi
# It is the log's too, where Slurm has a meaning for %; and scancel takes several with commas.
[[ $action == list || $job =~ ^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$ ]] ||
  fail "--name=$job must be letters, digits, dots, dashes and underscores, 100 at most, starting with a letter or a digit."
[[ -n $dry_run ]] || command -v sbatch >/dev/null || fail "sbatch is not on PATH: run it on a machine of the cluster."

case $action in
  list) run squeue --me; exit ;;
  logs) run tail -n 100 -F "$logs/$job.log"; exit ;;
  delete) run scancel --me --name="$job"; exit ;;
esac

export SPECJAX_JAX=${SPECJAX_JAX:-jax[cuda13]}
run mkdir -p "$logs"
run "$root/launch/setup.sh"
# A process a GPU is what jax makes of Slurm's environment.
run sbatch --job-name="$job" --nodes="$nodes" --ntasks-per-node="$gpus" --gpus-per-node="$gpus" \
  --requeue --open-mode=append --output="$logs/$job.log" ${time:+--time="$time"} \
  ${sbatch_flags[@]+"${sbatch_flags[@]}"} \
  --export=ALL,SPECJAX_PROCESSES=auto --wrap="srun $(quoted "$root/launch/worker.sh" "$@")"

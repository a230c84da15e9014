#!/usr/bin/env bash
# Runs an experiment on TPUs of a GKE cluster through xpk (https://github.com/AI-Hypercomputer/xpk).
#
#   ./launch/gke_xpk.sh --name=NAME --cluster=CLUSTER --zone=ZONE --type=TYPE --results=FOLDER [flags] EXPERIMENT [its flags]
#   ./launch/gke_xpk.sh --name=pair --cluster=mine --zone=us-central2-b --type=v4-32 --results=/results quickstart
#   ./launch/gke_xpk.sh --list --cluster=CLUSTER --zone=ZONE
#   ./launch/gke_xpk.sh --logs --name=NAME        the end of every worker's log, by kubectl
#   ./launch/gke_xpk.sh --delete --name=NAME --cluster=CLUSTER --zone=ZONE
#
#   --type      as xpk has it, such as v5litepod-16, v6e-8, v4-32
#   --results   a folder of a storage that is attached to the cluster (`xpk storage attach`, such as a bucket by
#               gcsfuse): pods have none that outlives them. A pod that is restarted goes on with the items finished there
#   --restarts  how often, after a pre-emption or a failure (default: 10)
#   --slices    how many slices (default: 1)
#   --image     the image that the commit is put on (default: python:3.12)
#   --project   default: that of `gcloud config`
#   --xpk-flag  a further flag for `xpk workload create`, such as --xpk-flag=--priority=high; repeat it
#   --dry-run   prints the commands in place of running them
#
# Needs xpk, docker and kubectl. HEAD is shipped, uncommitted changes are not. It returns once the workload is submitted.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$root/launch/common.sh"

action=run workload='' cluster='' zone='' type='' results='' restarts=10 slices=1 image=python:3.12 project='' dry_run=''
xpk_flags=()
while [[ ${1:-} == -* ]]; do
  case $1 in
    --help) help; exit ;;
    --name | --name=*) workload=$(value_of "$1") ;;
    --cluster | --cluster=*) cluster=$(value_of "$1") ;;
    --zone | --zone=*) zone=$(value_of "$1") ;;
    --type | --type=*) type=$(value_of "$1") ;;
    --results | --results=*) results=$(value_of "$1") ;;
    --restarts | --restarts=*) restarts=$(value_of "$1") ;;
    --slices | --slices=*) slices=$(value_of "$1") ;;
    --image | --image=*) image=$(value_of "$1") ;;
    --project | --project=*) project=$(value_of "$1") ;;
    --xpk-flag | --xpk-flag=*) xpk_flags+=("$(value_of "$1")") ;;
    --dry-run) dry_run=1 ;;
    --list | --logs | --delete)
      [[ $action == run ]] || fail "--$action and $1 are two things to do: one at a time."
      action=${1#--}
      ;;
    *) fail "unknown flag $1. See --help. Flags of the experiment come behind its name." ;;
  esac
  shift
done

needed() { [[ -n $2 ]] || fail "$1 is missing. See --help."; }

[[ $action == list ]] || { needed --name "$workload" && cloud_name --name "$workload" 40; } # xpk's limits
[[ $action == logs ]] || { needed --cluster "$cluster" && cloud_name --cluster "$cluster" 40 && needed --zone "$zone"; }
if [[ $action == run ]]; then
  needed --type "$type"
  needed --results "$results"
  [[ $results == /* ]] || fail "--results=$results must be a path in the pods, such as /results."
  require_experiment "${1:-}"
  require_own_flags_first "$@"
  whole_number --restarts "$restarts" 0
  whole_number --slices "$slices"
  require_commit
else
  [[ $# == 0 ]] || fail "--$action takes no experiment, got: $(quoted "$@")."
fi
tool=xpk
[[ $action != logs ]] || tool=kubectl
[[ -n $dry_run ]] || command -v "$tool" >/dev/null || fail "$tool is not on PATH."

where=(--cluster="$cluster" --zone="$zone" ${project:+--project="$project"})
case $action in
  list) run xpk workload list "${where[@]}"; exit ;;
  logs)
    run kubectl logs --selector="jobset.sigs.k8s.io/jobset-name=$workload" --all-containers --prefix --tail=100
    exit
    ;;
  delete) run xpk workload delete --workload="$workload" "${where[@]}"; exit ;;
esac

temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
# A clone: the image gets the commit and its name, and nothing else that lies around here.
run git clone --quiet "$root" "$temporary/specjax"
run git -C "$temporary/specjax" checkout --quiet --detach "$commit"
run xpk workload create --workload="$workload" "${where[@]}" --tpu-type="$type" --num-slices="$slices" \
  --max-restarts="$restarts" --base-docker-image="$image" --script-dir="$temporary/specjax" \
  --env=SPECJAX_RESULTS="$results" --env=SPECJAX_PROCESSES=auto --env=SPECJAX_JAX="jax[tpu]" \
  ${xpk_flags[@]+"${xpk_flags[@]}"} --command="./launch/worker.sh $(quoted "$@")"

#!/usr/bin/env bash
# Runs an experiment in several processes on this machine, each with several CPU devices, as on the hosts of a pod.
#
#   ./launch/multiprocess.sh [--processes=2] [--devices=4] [--heartbeat=20] [--dry-run] EXPERIMENT [its flags]
#   ./launch/multiprocess.sh --processes=2 --devices=2 quickstart --config.parts=4
#
#   --processes   how many
#   --devices     CPU devices of each
#   --heartbeat   seconds without a sign of life after which the others take a process for dead, and end
#   --dry-run     prints the commands in place of running them
#
# They talk over loopback. Process 0 writes to stdout and writes the results; what the others say is marked by their
# number. The status is that of the first process, by number, that failed. See worker.sh for the rest.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$root/launch/common.sh"

processes=2 devices=4 heartbeat=20 dry_run=
while [[ ${1:-} == -* ]]; do
  case $1 in
    --help) help; exit ;;
    --dry-run) dry_run=1 ;;
    --processes | --processes=*) processes=$(value_of "$1") ;;
    --devices | --devices=*) devices=$(value_of "$1") ;;
    --heartbeat | --heartbeat=*) heartbeat=$(value_of "$1") ;;
    *) fail "unknown flag $1. See --help." ;;
  esac
  shift
done
whole_number --processes "$processes"
whole_number --devices "$devices"
whole_number --heartbeat "$heartbeat"
require_experiment "${1:-}"
require_own_flags_first "$@"

port=PORT
if [[ -z $dry_run ]]; then
  "$root/launch/setup.sh"
  port=$("$root/.venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
fi
settings=(
  JAX_PLATFORMS=cpu
  JAX_NUM_CPU_DEVICES="$devices"
  JAX_COORDINATOR_ADDRESS="127.0.0.1:$port"
  JAX_COORDINATOR_BIND_ADDRESS="127.0.0.1:$port"
  SPECJAX_PROCESSES="$processes"
  SPECJAX_HEARTBEAT="$heartbeat"
)

if [[ -n $dry_run ]]; then
  for ((i = 0; i < processes; i++)); do
    run env "${settings[@]}" SPECJAX_PROCESS="$i" "$root/launch/worker.sh" "$@"
  done
  exit
fi

started=()
# shellcheck disable=SC2329 # the trap calls it
stop() {
  local pid
  for pid in ${started[@]+"${started[@]}"}; do
    kill -TERM -- "-$pid" 2>/dev/null || true
  done
}
trap stop EXIT
trap 'exit 130' INT TERM

set -m # each in a process group of its own, which `stop` ends whole
for ((i = 0; i < processes; i++)); do
  env "${settings[@]}" SPECJAX_PROCESS="$i" "$root/launch/worker.sh" "$@" 2> >(exec sed -u "s/^/[$i] /" >&2) &
  started+=($!)
done

# Once one has ended, the others should too; one that hangs cannot, and gets no more time than they take to notice.
running() {
  local pid count=0
  for pid in "${started[@]}"; do
    ! kill -0 "$pid" 2>/dev/null || count=$((count + 1))
  done
  echo "$count"
}
while (($(running) == processes)); do sleep 0.2; done
for ((tenths = 0; tenths < 10 * (heartbeat + 5); tenths += 2)); do
  (($(running))) || break
  sleep 0.2
done
for pid in "${started[@]}"; do
  kill -KILL -- "-$pid" 2>/dev/null || true
done

status=0
for ((i = 0; i < processes; i++)); do
  code=0
  wait "${started[i]}" || code=$?
  if ((code)); then
    say "process $i of $processes ended with status $code$( ((code > 128)) && echo ", signal $((code - 128))" || true)."
    ((status)) || status=$code
  fi
done
exit "$status"

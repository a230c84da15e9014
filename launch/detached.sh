#!/usr/bin/env bash
# Runs an experiment so that it outlives the connection that started it, and follows it to its end.
#
#   ./launch/detached.sh EXPERIMENT [flags of experiments/EXPERIMENT.py]
#   ./launch/detached.sh --ended    prints "running", "ended STATUS" or "none", and forgets a run that has ended
#   ./launch/detached.sh --stop     ends the run
#
# One run at a time: while another goes on the status is 75. The same words at the same commit follow the run that there is, or that ended and was not forgotten:
# tpu_vm.sh calls this on its workers, and gcloud by itself repeats a command whose connection was lost. What the run
# says is in .run/log. See worker.sh for the rest.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$root/launch/common.sh"
cd "$root"
mkdir -p .run

# Every process of the run holds the lock, so that it is free again however they end.
running() { ! flock --nonblock .run/lock true; }

case ${1:-} in
  --help) help; exit ;;
  --ended)
    if running; then
      echo running
    elif [[ -f .run/words ]]; then
      echo "ended $(cat .run/status 2>/dev/null || echo 137)"
      rm -f .run/words .run/status
    else
      echo none
    fi
    exit
    ;;
  --stop)
    if running; then
      kill -TERM -- "-$(<.run/pid)"
    else
      say "nothing runs here."
    fi
    exit
    ;;
esac
require_experiment "${1:-}"

words="$(git rev-parse HEAD) $(quoted "$@")" lines=20
exec 9>>.run/lock
if flock --nonblock 9; then
  if [[ ! -f .run/status || $(cat .run/words) != "$words" ]]; then
    lines=+1
    rm -f .run/status
    echo "$words" >.run/words
    : >.run/log # now, for the one that reads it below
    # shellcheck disable=SC2016 # for the inner shell
    setsid bash -c 'code=0; "$@" || code=$?; echo "$code" >.run/status.new; mv .run/status.new .run/status' \
      detached ./launch/worker.sh "$@" </dev/null >>.run/log 2>&1 &
    echo "$!" >.run/pid
  fi
elif [[ $(<.run/words) != "$words" ]]; then
  say "another run is going on here, and --stop ends it: $(<.run/words)"
  exit 75
fi
exec 9>&-

follow=()
! running || follow=(-f -s 0.5 --pid="$(<.run/pid)")
tail -n "$lines" ${follow[@]+"${follow[@]}"} .run/log
exit "$(cat .run/status 2>/dev/null || echo 137)"

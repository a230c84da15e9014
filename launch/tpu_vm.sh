#!/usr/bin/env bash
# Runs an experiment on a Cloud TPU VM or pod slice: creates it, ships the commit, installs, runs on all workers, fetches
# the results, and deletes what it created.
#
#   ./launch/tpu_vm.sh --name=NAME --zone=ZONE --type=TYPE [flags] EXPERIMENT [flags of experiments/EXPERIMENT.py]
#   ./launch/tpu_vm.sh --name=pair --zone=us-central2-b --type=v4-32 --spot quickstart --config.gamma=4
#   ./launch/tpu_vm.sh --list --zone=ZONE
#   ./launch/tpu_vm.sh --logs --name=NAME --zone=ZONE        the end of every worker's log
#   ./launch/tpu_vm.sh --fetch --name=NAME --zone=ZONE       the results so far
#   ./launch/tpu_vm.sh --stop --name=NAME --zone=ZONE        ends the run and leaves the TPU
#   ./launch/tpu_vm.sh --delete --name=NAME --zone=ZONE
#
#   --type        accelerator type, such as v5litepod-8, v6e-8, v4-32
#   --runtime     software version (default: by the type)
#   --project     default: that of `gcloud config`
#   --spot        a cheaper TPU that may be pre-empted: it is then created again, and the run goes on with the items that
#                 were finished at the last fetch (checkpoints: point the experiment's own flags at a bucket)
#   --queued      waits in the queue of queued resources, where one without would be refused for want of capacity
#   --keep        does not delete it at the end. One that was there before is used as it is, and always kept
#   --attempts    how often to try, creation included (default: 1; with --spot 10)
#   --fetch-every seconds between fetches during the run (default: 60)
#   --poll        seconds between looks at a TPU that is on its way (default: 15)
#   --create-flag a further flag for the gcloud command that creates it, such as --create-flag=--network=NAME; repeat it
#   --dry-run     prints the commands for a TPU that is not there yet, in place of running them
#
# Needs gcloud, logged in; for slices of several machines with its key in ssh-agent, without which gcloud stalls:
# ssh-add ~/.ssh/google_compute_engine. HEAD is shipped, uncommitted changes are not. Worker 0 writes the results; they go
# to experiments/results/NAME here, with what it said in run.log. The run outlives a lost connection, Ctrl-C and a laptop that sleeps: the same command
# again follows it. What is pre-empted meanwhile is created again only by a script that is there: for long runs on spot
# TPUs start it in tmux on a machine that stays on. The status is that of the experiment.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$root/launch/common.sh"

action=run tpu='' zone='' type='' runtime='' project='' spot='' queued='' keep='' attempts='' dry_run=''
fetch_every=60 poll=15 create_flags=()
while [[ ${1:-} == -* ]]; do
  case $1 in
    --help) help; exit ;;
    --name | --name=*) tpu=$(value_of "$1") ;;
    --zone | --zone=*) zone=$(value_of "$1") ;;
    --type | --type=*) type=$(value_of "$1") ;;
    --runtime | --runtime=*) runtime=$(value_of "$1") ;;
    --project | --project=*) project=$(value_of "$1") ;;
    --attempts | --attempts=*) attempts=$(value_of "$1") ;;
    --fetch-every | --fetch-every=*) fetch_every=$(value_of "$1") ;;
    --poll | --poll=*) poll=$(value_of "$1") ;;
    --create-flag | --create-flag=*) create_flags+=("$(value_of "$1")") ;;
    --spot) spot=1 ;;
    --queued) queued=1 ;;
    --keep) keep=1 ;;
    --dry-run) dry_run=1 ;;
    --list | --logs | --fetch | --stop | --delete)
      [[ $action == run ]] || fail "--$action and $1 are two things to do: one at a time."
      action=${1#--}
      ;;
    *) fail "unknown flag $1. See --help. Flags of the experiment come behind its name." ;;
  esac
  shift
done

[[ -n $zone ]] || fail "--zone=ZONE is missing, such as --zone=us-central2-b."
if [[ $action != list ]]; then
  [[ -n $tpu ]] || fail "--name=NAME is missing: any name for the TPU."
  cloud_name --name "$tpu" 62
fi
if [[ $action == run ]]; then
  [[ -n $type ]] || fail "--type=TYPE is missing, such as --type=v5litepod-8."
  require_experiment "${1:-}"
  require_own_flags_first "$@"
  attempts=${attempts:-$([[ -n $spot ]] && echo 10 || echo 1)}
  whole_number --attempts "$attempts"
  whole_number --fetch-every "$fetch_every"
  whole_number --poll "$poll"
  # https://cloud.google.com/tpu/docs/runtimes
  case ${runtime:-$type} in
    "$runtime") ;;
    v2-* | v3-* | v4-*) runtime="tpu-ubuntu2204-base" ;;
    v5litepod-*) runtime="v2-alpha-tpuv5-lite" ;;
    v5p-*) runtime="v2-alpha-tpuv5" ;;
    v6e-*) runtime="v2-alpha-tpuv6e" ;;
    *)
      fail "no software version is known for --type=$type: give --runtime=VERSION." \
        "Known are v2-*, v3-*, v4-*, v5litepod-*, v5p-* and v6e-*."
      ;;
  esac
  require_commit
  [[ $(git -C "$root" rev-parse --is-shallow-repository) == false ]] ||
    fail "this clone is shallow, which can't be shipped: 'git fetch --unshallow' first."
else
  [[ $# == 0 ]] || fail "--$action takes no experiment, got: $(quoted "$@")."
fi
[[ -n $dry_run ]] || command -v gcloud >/dev/null ||
  fail "gcloud is not on PATH: https://cloud.google.com/sdk/docs/install, then 'gcloud auth login'."

where=(--zone="$zone" ${project:+--project="$project"})
vm=(gcloud compute tpus tpu-vm)
queue=(gcloud compute tpus queued-resources)
results=$root/experiments/results/$tpu
temporary=$(mktemp -d)

# WORKER COMMAND. A machine that vanished says nothing: without ServerAliveInterval ssh would wait for it for ever.
on() { run "${vm[@]}" ssh "$tpu" "${where[@]}" --worker="$1" --ssh-flag=-oServerAliveInterval=30 --command="$2"; }

copy() { run "${vm[@]}" scp "$2" "$3" "${where[@]}" --worker="$1"; } # WORKER FROM TO

state() { run "${vm[@]}" list "${where[@]}" --filter="name~(^|/)$tpu\$" --format='value(state)'; }

queued_state() { "${queue[@]}" list "${where[@]}" --filter="name~(^|/)$tpu\$" --format='value(state.state)'; }

create() {
  local flags=(--accelerator-type="$type" ${spot:+--spot} ${create_flags[@]+"${create_flags[@]}"})
  if [[ -n $queued ]]; then
    run "${queue[@]}" create "$tpu" --node-id="$tpu" "${where[@]}" "${flags[@]}" --runtime-version="$runtime"
  else
    run "${vm[@]}" create "$tpu" "${where[@]}" "${flags[@]}" --version="$runtime"
  fi
}

# A VM of a queued resource goes with it.
delete() {
  local as_queued=$queued
  [[ -n $dry_run ]] || as_queued=$(queued_state) || return
  if [[ -n $as_queued ]]; then
    run "${queue[@]}" delete "$tpu" "${where[@]}" --force --quiet
  else
    run "${vm[@]}" delete "$tpu" "${where[@]}" --quiet
  fi
}

# Waits for a TPU that is on its way; status 1 if it will not come.
await() {
  local now before='' failures=0
  if [[ -n $dry_run ]]; then
    echo "# until it is READY:"
    state
    return
  fi
  while ((failures < 20)); do
    if now=$(state) && [[ -n $now ]] || now=$(queued_state); then
      failures=0
      case $now in
        READY) return 0 ;;
        '' | FAILED | SUSPENDING | SUSPENDED | PREEMPTED | TERMINATED | STOPPED | DELETING) return 1 ;;
      esac
      [[ $now == "$before" ]] || say "$tpu is $now"
      before=$now
    else
      failures=$((failures + 1))
    fi
    sleep "$poll"
  done
  return 1
}

# Replaces the results here by those of worker 0.
fetch() {
  local archive=$temporary/fetched.tar.gz new=$temporary/fetched
  on 0 "cd specjax && mkdir -p experiments/results && { ! test -f .run/log || cp .run/log experiments/results/run.log; } &&\
 tar -C experiments/results -czf ../fetched.tar.gz ." &&
    copy 0 "$tpu:fetched.tar.gz" "$archive" || return
  [[ -z $dry_run ]] || return 0
  rm -rf "$new"
  mkdir -p "$new" "${results%/*}" && tar -C "$new" -xzf "$archive" && rm -rf "$results" && mv "$new" "$results"
}

# Puts the results of an earlier machine, finished items among them, on worker 0.
restore() {
  [[ -z $dry_run ]] || echo "# if a machine before it left results in $results:"
  [[ -n $dry_run || -d $results ]] || return 0
  [[ -n $dry_run ]] || tar -C "$results" -czf "$temporary/kept.tar.gz" . || return
  copy 0 "$temporary/kept.tar.gz" "$tpu:kept.tar.gz" &&
    on 0 "mkdir -p specjax/experiments/results && tar -C specjax/experiments/results -xzf kept.tar.gz"
}

# The commit and what it needs, on all workers; not beneath a run of another commit.
ship() {
  local bundle=$temporary/specjax.bundle
  run git -C "$root" bundle create --quiet "$bundle" HEAD &&
    copy all "$bundle" "$tpu:specjax.bundle" &&
    on all "git init --quiet specjax && cd specjax && mkdir -p .run && { flock --nonblock .run/lock true ||\
 grep --quiet '^$commit ' .run/words || { echo 'A run of another commit is going on: --stop ends it.' >&2; exit 1; }; } &&\
 git fetch --quiet ../specjax.bundle HEAD && git checkout --quiet --force --detach $commit" &&
    on all "cd specjax && SPECJAX_FETCH_PYTHON=1 SPECJAX_JAX='jax[tpu]' ./launch/setup.sh"
}

fetcher=''
stop_fetching() {
  [[ -n $fetcher ]] || return 0
  kill -- "-$fetcher" 2>/dev/null || true
  wait "$fetcher" 2>/dev/null || true
  fetcher=''
}

# The experiment on all workers, started or followed, with fetches meanwhile; its status, or 1 if they can't be reached.
# That of the command that follows it won't do: gcloud has the same ones for troubles of its own.
work() {
  local now told code followed failures=0
  if [[ -z $dry_run ]]; then
    set -m # in a process group of its own, which `stop_fetching` ends whole
    (while sleep "$fetch_every"; do fetch || true; done) >/dev/null 2>&1 &
    fetcher=$!
    set +m
  fi
  while ((failures < 20)); do
    code=1 followed=0
    on all "cd specjax && SPECJAX_PROCESSES=auto ./launch/detached.sh $(quoted "$@")" || followed=$?
    if told=$(on all "cd specjax && ./launch/detached.sh --ended"); then
      [[ -z $dry_run ]] || { echo "$told" && return; }
      failures=0
      if [[ $told == *running* ]]; then
        # 75: another run than this one is going on, and was not touched.
        ((followed != 75)) || { code=75 && break; }
      elif [[ $told == *ended* ]]; then
        code=$(sed -n 's/^ended //p' <<<"$told" | sort -n | tail -n 1)
        break
      fi
    else
      now=$(state) && [[ $now != READY ]] && break
      failures=$((failures + 1))
    fi
    say "lost the connection to $tpu: trying again."
    sleep "$poll"
  done
  stop_fetching
  return "$code"
}

# Whether there is a TPU to work on, made or found; sets `fresh` for one without anything on it.
provide() {
  local now='' was_queued=''
  fresh=1
  if [[ -z $dry_run ]]; then
    if ! now=$(state) || ! was_queued=$(queued_state); then
      fail "gcloud can't be asked for $tpu: see its message above."
    fi
    case ${now:-$was_queued} in
      '' | FAILED | SUSPENDED | PREEMPTED | TERMINATED | STOPPED)
        [[ -z $now$was_queued ]] || delete || return
        say "creating $tpu, $type (attempt $attempt of $attempts)"
        ;;
      *)
        [[ -n $created ]] || {
          say "$tpu is there already, ${now:-$was_queued}: it is used, and kept."
          fresh=''
        }
        await
        return
        ;;
    esac
  fi
  created=1
  create && await
}

created=''
# shellcheck disable=SC2329 # the trap calls it
leave() {
  stop_fetching
  rm -rf "$temporary"
  [[ -z $created || -n $dry_run ]] || say "$tpu is still there, and costs. The same command goes on with it; to delete" \
    "it: $0 --delete --name=$tpu --zone=$zone${project:+ --project=$project}"
}
trap leave EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

case $action in
  list) run "${vm[@]}" list "${where[@]}" && run "${queue[@]}" list "${where[@]}"; exit ;;
  logs) on all "tail -n 100 specjax/.run/log"; exit ;;
  stop) on all "cd specjax && ./launch/detached.sh --stop"; exit ;;
  fetch) fetch; exit ;;
  delete) delete; exit ;;
esac

status=1 finished=''
for ((attempt = 1; attempt <= attempts; attempt++)); do
  ((attempt == 1)) || sleep "$poll"
  provide || continue
  code=0
  # A machine that is just up may refuse its first connections.
  ship || { sleep "$poll" && ship; } || { sleep "$poll" && ship; } || code=$?
  if ((code == 0)); then
    { [[ -z $fresh ]] || restore; } && work "$@" || code=$?
  fi
  if [[ -z $dry_run ]] && ((code)); then
    [[ -z $spot ]] || sleep "$poll" # a TPU that is being taken away may look well for a moment
    if now=$(state) && [[ $now != READY ]]; then
      say "$tpu was pre-empted: it is ${now:-gone}."
      continue
    fi
  fi
  status=$code finished=1
  fetch || {
    say "the results could not be fetched."
    [[ -n $dry_run ]] || keep=1
  }
  break
done
[[ -n $finished ]] || say "no run came to its end in $attempts attempts."

[[ -n $keep || -z $created ]] || { delete && created=''; }
exit "$status"

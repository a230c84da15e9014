#!/usr/bin/env bash
# A cloud in a folder, in place of gcloud. $CLOUD/machines/NAME/0 and 1 are the homes of a TPU's two workers, `state`
# beside them is its state; $CLOUD/queue/NAME is a queued resource. Calls go to $CLOUD/calls, words in [brackets].
set -euo pipefail

printf '[%s]' "$@" | tr '\n' ' ' >>"$CLOUD/calls"
echo >>"$CLOUD/calls"
mkdir -p "$CLOUD/machines" "$CLOUD/queue"
verb="$3 $4"
shift 4

worker='' command='' name='' words=()
for word in "$@"; do
  case $word in
    --worker=*) worker=${word#*=} ;;
    --command=*) command=${word#*=} ;;
    --filter=*) name=${word##*)} name=${name%\$} ;;
    --*) ;;
    *) words+=("$word") ;;
  esac
done
workers=("$worker")
[[ $worker != all ]] || workers=(0 1)

boot() {
  mkdir -p "$CLOUD/machines/$1/0" "$CLOUD/machines/$1/1"
  echo CREATING >"$CLOUD/machines/$1/state"
}

# Runs the command on the workers of the machine in this folder. $CLOUD/drop has a line for every connection to an
# experiment that is to be lost: what runs in it is killed once the experiment has made $CLOUD/reached.
connect() {
  local w pid pids=() status=0
  set -m # a process group for each worker
  for w in "${workers[@]}"; do
    (cd "$1/$w" && WORKER=$w exec bash -c "$command") &
    pids+=($!)
  done
  set +m
  if [[ -s $CLOUD/drop && $command == *"detached.sh toy"* ]]; then
    until [[ -f $CLOUD/reached ]]; do sleep 0.1; done
    for pid in "${pids[@]}"; do kill -KILL -- "-$pid" || true; done
    sed -i 1d "$CLOUD/drop"
    return 255
  fi
  for pid in "${pids[@]}"; do wait "$pid" || status=$?; done
  return "$status"
}

case $verb in
  "tpu-vm list")
    state=$CLOUD/machines/$name/state
    [[ ! -f $state ]] || cat "$state"
    # Whoever looked once sees it ready the next time.
    [[ ! -f $state ]] || sed -i s/CREATING/READY/ "$state"
    ;;
  "queued-resources list")
    [[ ! -f $CLOUD/queue/$name ]] || cat "$CLOUD/queue/$name"
    if [[ -f $CLOUD/queue/$name && $(<"$CLOUD/queue/$name") == WAITING_FOR_RESOURCES ]]; then
      echo ACTIVE >"$CLOUD/queue/$name"
      boot "$name"
    fi
    ;;
  "tpu-vm create")
    [[ ! -f $CLOUD/refuse ]] || { echo "no capacity" >&2; exit 1; }
    boot "${words[0]}"
    ;;
  "queued-resources create") echo WAITING_FOR_RESOURCES >"$CLOUD/queue/${words[0]}" ;;
  "tpu-vm delete") rm -r "$CLOUD/machines/${words[0]}" ;;
  "queued-resources delete") rm -rf "$CLOUD/queue/${words[0]}" "$CLOUD/machines/${words[0]}" ;;
  "tpu-vm ssh")
    [[ -d $CLOUD/machines/${words[0]} ]] || exit 255
    status=0
    connect "$CLOUD/machines/${words[0]}" || status=$?
    ((status != 255)) || { status=0 && connect "$CLOUD/machines/${words[0]}" || status=$?; } # gcloud does so, too
    exit "$status"
    ;;
  "tpu-vm scp")
    for w in "${workers[@]}"; do
      paths=()
      for path in "${words[@]}"; do
        [[ $path != *:fetched.tar.gz || ! -f $CLOUD/unreachable ]] || exit 255
        [[ $path != *:* ]] || path=$CLOUD/machines/${path%%:*}/$w/${path#*:}
        paths+=("$path")
      done
      cp "${paths[@]}"
    done
    ;;
  *) echo "no such command: $verb" >&2; exit 2 ;;
esac

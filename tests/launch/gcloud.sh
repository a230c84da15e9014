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
    for w in "${workers[@]}"; do
      (cd "$CLOUD/machines/${words[0]}/$w" && WORKER=$w bash -c "$command") || status=$?
    done
    exit "$status"
    ;;
  "tpu-vm scp")
    for w in "${workers[@]}"; do
      paths=()
      for path in "${words[@]}"; do
        [[ $path != *:* ]] || path=$CLOUD/machines/${path%%:*}/$w/${path#*:}
        paths+=("$path")
      done
      cp "${paths[@]}"
    done
    ;;
  *) echo "no such command: $verb" >&2; exit 2 ;;
esac

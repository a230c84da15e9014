# shellcheck shell=bash
# What the launch scripts share; they source it with $root set.

name=$(basename "$0" .sh)

say() { echo "$name: $*" >&2; }

fail() {
  say "$*"
  exit 2
}

# The comment at the head of the script is its help.
help() { sed -n '2,/^[^#]/{/^#/!d; s/^# \{0,1\}//; p;}' "$0"; }

require_experiment() {
  local known
  known=$(cd "${root:?}/configs" && printf '%s ' *.py)
  known=${known//.py/}
  [[ -n $1 && $1 != -* ]] || fail "name an experiment: one of ${known% }. See --help."
  [[ -f $root/configs/$1.py && -f $root/experiments/$1.py ]] || fail "no experiment '$1': one of ${known% }."
}

# The script's own flags (the cases of its loop) must stand before the experiment's name: behind it they would be passed
# on, and a --dry-run would run.
require_own_flags_first() {
  local own word
  own=" $(sed -n 's/^    \(--[^)]*\)).*/\1/p' "$0" | tr '|\n' '  ')"
  for word in "$@"; do
    [[ $own != *" ${word%%=*} "* ]] || fail "$word is a flag of this script: it must stand before the experiment's name."
  done
}

# --flag=value: the value, which must not be empty.
value_of() {
  [[ $1 == *=?* ]] || fail "${1%%=*} needs a value: ${1%%=*}=VALUE."
  printf '%s' "${1#*=}"
}

# FLAG VALUE [LEAST]
whole_number() {
  local least=${3:-1}
  [[ $2 =~ ^(0|[1-9][0-9]{0,5})$ && $2 -ge $least ]] || fail "$1=$2 must be a whole number, $least or more."
}

# FLAG VALUE LONGEST: a name as Google Cloud and Kubernetes have them.
cloud_name() {
  [[ $2 =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ && ${#2} -le $3 ]] ||
    fail "$1=$2 must be lower-case letters, digits and dashes, $3 at most, starting with a letter, not ending with a dash."
}

# The words of a command in one line, quoted so that a shell reads them back.
quoted() {
  local word separator=
  for word in "$@"; do
    printf '%s' "$separator"
    # printf's own %q puts a backslash before every special character, which nobody can read.
    if [[ $word =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]]; then
      printf '%s' "$word"
    else
      printf "'%s'" "${word//\'/\'\\\'\'}"
    fi
    separator=' '
  done
}

# Runs a command, or prints it with --dry-run.
run() {
  if [[ -n ${dry_run:-} ]]; then
    quoted "$@"
    echo
  else
    "$@"
  fi
}

# Sets `commit` to HEAD, which is what other machines get.
require_commit() {
  commit=$(git -C "$root" rev-parse HEAD 2>/dev/null) || fail "$root is no git work tree: there is no commit to ship."
  git -C "$root" diff --quiet HEAD || say "uncommitted changes stay here: $commit is shipped."
}

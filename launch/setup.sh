#!/usr/bin/env bash
# Makes .venv in the repository ready to use. The other launch scripts call it; it returns at once when nothing changed.
#
#   ./launch/setup.sh
#
# Environment:
#   PYTHON        the interpreter to build .venv with (default: the first of python3, python3.13, python3.12, python3.11
#                 that is at least 3.11)
#   SPECJAX_FETCH_PYTHON  if set and there is no such Python, one is fetched with uv (the images of TPU VMs have 3.10)
#   SPECJAX_JAX   the jax to install, e.g. "jax[tpu]" or "jax[cuda13]" (default: the last one asked for, else "jax")
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
# Line 1: what was installed; line 2: which jax. Taken away first and written last, so that a .venv without it is one
# whose installation was interrupted: pip takes a half-copied package for a whole one, so such a .venv is made anew.
stamp=$venv/specjax-stamp

supported() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

fetch_python() {
  echo "setup: fetching Python 3.12" >&2
  python3 -m pip install --quiet --disable-pip-version-check --user uv >&2 &&
    python3 -m uv python install --quiet 3.12 >&2 && python3 -m uv python find --managed-python 3.12
}

choose_python() {
  local candidate
  if [[ -n ${PYTHON:-} ]]; then
    supported "$PYTHON" && echo "$PYTHON" && return
    echo "setup: PYTHON=$PYTHON is not a Python of at least 3.11. Name one that is, or unset PYTHON." >&2
    return 1
  fi
  for candidate in python3 python3.13 python3.12 python3.11; do
    supported "$candidate" && echo "$candidate" && return
  done
  [[ -z ${SPECJAX_FETCH_PYTHON:-} ]] || { fetch_python && return; }
  echo "setup: no Python of at least 3.11 on PATH (tried python3, python3.13, python3.12, python3.11)." \
    "Install one, or set PYTHON=/path/to/python." >&2
  return 1
}

# An existing .venv is kept unless it is broken, or PYTHON asks for another version.
usable() {
  [[ -f $stamp ]] && supported "$venv/bin/python" &&
    [[ -z ${PYTHON:-} || $(version "$venv/bin/python") == $(version "$PYTHON") ]]
}

# The path is part of it: the editable install points there, so a moved clone has to be installed again.
digest() {
  "$venv/bin/python" - "$root" "$1" <<'END'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
files = [(root / name).read_bytes() for name in ("pyproject.toml", "requirements.txt")]
print(hashlib.sha256(b"\0".join([*files, sys.version.encode(), *map(str.encode, sys.argv[1:])])).hexdigest())
END
}

ready() {
  jax=${SPECJAX_JAX:-$(sed -n 2p "$stamp" 2>/dev/null || echo jax)}
  usable && [[ $(sed -n 1p "$stamp") == "$(digest "$jax")" ]]
}

ready && exit

# Two shells may arrive here together: the second waits, then finds the work done.
if command -v flock >/dev/null; then
  exec 9<"${BASH_SOURCE[0]}"
  flock 9
  ready && exit
fi

if ! usable; then
  python=$(choose_python)
  if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
    echo "setup: $python has no venv module with pip. On Debian or Ubuntu: apt-get install python3-venv." >&2
    exit 1
  fi
  echo "setup: creating $venv with Python $(version "$python")" >&2
  rm -f "$stamp"
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi

rm -f "$stamp"
echo "setup: installing into $venv (about two minutes the first time)" >&2
quiet=--quiet
[[ -t 2 ]] && quiet=
# shellcheck disable=SC2086 # an empty $quiet must vanish
"$venv/bin/python" -m pip install $quiet --disable-pip-version-check \
  -r "$root/requirements.txt" -e "${root}[test]" "$jax" >&2
printf '%s\n' "$(digest "$jax")" "$jax" >"$stamp.new"
mv "$stamp.new" "$stamp"

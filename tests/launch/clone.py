"""A clone of the repository with the real launch scripts, an experiment of a few lines, and commands that record."""

import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]

# In place of setup.sh, which installs for minutes.
SETUP = f"""#!/usr/bin/env bash
root=$(cd "$(dirname "${{BASH_SOURCE[0]}}")/.." && pwd)
mkdir -p "$root/.venv/bin"
[[ -x $root/.venv/bin/python ]] || {{
  echo '#!/bin/sh
exec {sys.executable} "$@"' >"$root/.venv/bin/python.$$"
  chmod +x "$root/.venv/bin/python.$$"
  mv "$root/.venv/bin/python.$$" "$root/.venv/bin/python"
}}
echo "setup with ${{SPECJAX_JAX:-jax}}" >>"$root/.venv/setup.log"
"""

# A command that records its words, one call a block, and does nothing.
RECORDER = """#!/usr/bin/env bash
printf '%s\\n' "$(basename "$0")" "$@" '' >>"$RECORDED"
"""


def make(folder: pathlib.Path, experiment: str, *parts: str) -> pathlib.Path:
  """A clone in `folder` whose only experiment, `toy`, is the given program; parts: other files of experiments/."""
  root = folder / "clone"
  shutil.copytree(ROOT / "launch", root / "launch")
  (root / "launch" / "setup.sh").write_text(SETUP)
  for name, text in {"configs/toy.py": "", "experiments/toy.py": experiment, ".gitignore": ".venv\n"}.items():
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text(text)
  for name in parts:
    shutil.copy(ROOT / "experiments" / name, root / "experiments" / name)
  for words in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "all"]):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True)
  return root


def commit(root: pathlib.Path) -> str:
  words = ["git", "rev-parse", "HEAD"]
  return subprocess.run(words, cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def call(root: pathlib.Path, script: str, *arguments: str, **environment: str):
  """Runs a launch script, from another folder."""
  return subprocess.run(
    [str(root / "launch" / script), *arguments],
    cwd=root.parent,
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
    timeout=120,
  )


def command(folder: pathlib.Path, name: str, text: str) -> pathlib.Path:
  """Puts a program into `folder`."""
  folder.mkdir(exist_ok=True)
  path = folder / name
  path.write_text(text)
  path.chmod(0o755)
  return path

"""requirements.txt and pyproject.toml state the same dependencies."""

import pathlib
import tomllib

ROOT = pathlib.Path(__file__).parent.parent


def test_requirements_txt_agrees_with_pyproject():
  dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
  lines = (ROOT / "requirements.txt").read_text().splitlines()
  requirements = [line for line in lines if line and not line.startswith("#")]
  assert sorted(requirements) == sorted(dependencies)

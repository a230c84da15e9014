"""Samples in, samples out, and what is wrong with a file said by its line."""

import json

import numpy as np
import pytest

from specjax.audit import Samples

FULL = Samples(
  prompts=[[1, 2], [3]],
  tokens=[[4, 5, 6], []],
  rows=[0, 1],
  labels=[["accepted", "residual", ""], []],
  logprobs=[[-0.5, -1.25, -2.0], []],
  draft_logprobs=[[-0.25, None, -3.0], []],
)


def same(a: Samples, b: Samples) -> None:
  for name in ("prompts", "tokens", "labels", "logprobs", "draft_logprobs"):
    for x, y in zip(getattr(a, name), getattr(b, name), strict=True):
      np.testing.assert_array_equal(x, y)
  np.testing.assert_array_equal(a.rows, b.rows)


def test_write_and_read(tmp_path):
  FULL.write(tmp_path / "folder" / "s.jsonl")
  same(Samples.read(tmp_path / "folder" / "s.jsonl"), FULL)
  assert [path.name for path in (tmp_path / "folder").iterdir()] == ["s.jsonl"]
  for line in (tmp_path / "folder" / "s.jsonl").read_text().splitlines():
    json.loads(line, parse_constant=pytest.fail)  # NaN is no JSON


def test_concatenate():
  both = Samples.concatenate([FULL, FULL])
  assert len(both.tokens) == 4
  same(Samples.concatenate([FULL]), FULL)
  assert Samples.concatenate([FULL, Samples([[1]], [[2]])]).labels is None
  assert both.num_tokens == 6
  assert repr(FULL) == "Samples(2 generations, 3 tokens, rows, labels, logprobs, draft_logprobs)"


WRONG = {
  "lengths": ({"prompts": [[1]], "tokens": [[1], [2]]}, "tokens has 2 entries, prompts has 1"),
  "rows": ({"prompts": [[1]], "tokens": [[1]], "rows": [0, 1]}, "rows has 2 entries"),
  "negative row": ({"prompts": [[1]], "tokens": [[1]], "rows": [-1]}, r"rows\[0\]=-1"),
  "labels": ({"prompts": [[1]], "tokens": [[1, 2]], "labels": [["bonus"]]}, r"labels\[0\] has 1 entries, .* 2 tokens"),
  "label": ({"prompts": [[1]], "tokens": [[1]], "labels": [["bonsu"]]}, "'bonsu'; allowed: accepted, residual, bonus"),
  "logprobs": ({"prompts": [[1]], "tokens": [[1]], "logprobs": [["x"]]}, r"logprobs\[0\] must hold numbers"),
  "prompt": ({"prompts": [[]], "tokens": [[1]]}, r"prompts\[0\] is empty"),
  "floats": ({"prompts": [[1]], "tokens": [[1.5]]}, r"tokens\[0\] must be a list of integers"),
  "text": ({"prompts": [[1]], "tokens": ["abc"]}, r"tokens\[0\] must be a list of integers"),
  "large": ({"prompts": [[1]], "tokens": [[2**40]]}, "which is no int32"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_fields_that_do_not_fit(name):
  fields, message = WRONG[name]
  with pytest.raises(ValueError, match=message):
    Samples(**fields)


class Letters:
  """A token a letter; "A" is lost."""

  def encode(self, text):
    return [ord(c) for c in text if c != "A"]

  def decode(self, ids):
    return "".join(map(chr, ids))


class Pairs(Letters):
  """Two letters a token, from the left."""

  def encode(self, text):
    return [
      ord(text[i]) * 1000 + ord(text[i + 1]) if i + 1 < len(text) else ord(text[i]) for i in range(0, len(text), 2)
    ]


def written(tmp_path, *lines):
  path = tmp_path / "s.jsonl"
  path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
  return path


def test_text(tmp_path):
  path = written(tmp_path, {"prompt": "ab", "text": "cd"}, "", {"prompt": "x", "text": ""})
  made = Samples.read(path, Letters())
  assert made.from_text
  np.testing.assert_array_equal(made.tokens[0], [99, 100])
  assert len(made.tokens[1]) == 0
  assert not Samples.read(written(tmp_path, {"prompt_tokens": [1], "tokens": [2]}), Letters()).from_text


GOOD = {"prompt_tokens": [1], "tokens": [2]}
BAD_LINES = {
  "json": (["{"], None, "line 1"),
  "list": ([GOOD, [1, 2]], None, "line 2: must be a JSON object, got list"),
  "keys": ([GOOD, {"prompt_tokens": [1]}], None, "line 2: must have 'prompt_tokens' and 'tokens'"),
  "text": ([{"prompt": "a", "text": "b"}], None, "holds text and no ids; give a tokenizer"),
  "null": ([{"prompt": "a", "text": None}], Letters(), "must be strings"),
  "round trip": ([{"prompt": "a", "text": "A"}], Letters(), "is this the target's tokenizer"),
  "middle of a token": ([{"prompt": "abc", "text": "d"}], Pairs(), "does not begin with the prompt's"),
  "some": ([{**GOOD, "row": 0}, GOOD], None, "generation 1 has no 'row', others have"),
  "empty": ([""], None, "holds no generations"),
  "floats": ([{"prompt_tokens": [1], "tokens": [0.5]}], None, r"s.jsonl: tokens\[0\] must be a list of integers"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_lines_that_can_not_be_read(name, tmp_path):
  lines, tokenizer, message = BAD_LINES[name]
  with pytest.raises(ValueError, match=message):
    Samples.read(written(tmp_path, *lines), tokenizer)

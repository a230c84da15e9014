"""Samples in, samples out, and what is wrong with a file said by its line."""

import json

import jax.numpy as jnp
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
  "logprobs": ({"prompts": [[1]], "tokens": [[1]], "logprobs": [["x"]]}, r"logprobs\[0\] must be a list of numbers"),
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


TWO = {"prompts": [[1], [1]], "tokens": [[1], [2, 3]]}
NOT_OF_THEIR_TYPE = {
  "no list of labels": ({"labels": 5}, "labels must be a list with an entry a generation, got 5"),
  "no list of logprobs": ({"logprobs": 5}, "logprobs must be a list with an entry a generation"),
  "no list of draft_logprobs": ({"draft_logprobs": 7}, "draft_logprobs must be a list"),
  "no list of rows": ({"rows": 0}, "rows must be a list with an entry a generation, got 0"),
  "one limit": ({"max_new_tokens": 5}, "max_new_tokens must be a list with an entry a generation, got 5"),
  "a scalar array": ({"max_new_tokens": np.int32(5)}, "max_new_tokens must be a list"),
  "no list of prompts": ({"prompts": None}, "prompts must be a list with an entry a generation, got None"),
  "text for tokens": ({"tokens": "ab"}, "tokens must be a list with an entry a generation, got 'ab'"),
  "none": ({"labels": [["bonus"], None]}, r"labels\[1\] must be a list of words, got None"),
  "a number": ({"logprobs": [[-1], -1]}, r"logprobs\[1\] must be a list of numbers, got -1"),
  "a word": ({"labels": [["bonus"], "bonus"]}, r"labels\[1\] must be a list of words, got 'bonus'"),
  "numbers for labels": ({"labels": [["bonus"], ["", 1]]}, r"labels\[1\] must be a list of words, but entry 1 is 1"),
  "nested labels": ({"labels": [[["bonus"]], ["", ""]]}, r"labels\[0\] .* entry 0 is \['bonus'\]"),
  "a long label": ({"labels": [[""], ["", "residual-or-so"]]}, r"labels\[1\] holds 'residual-or-so'; allowed"),
  "a label that goes on": ({"labels": [["bonus\0"], ["", ""]]}, r"labels\[0\] holds 'bonus\\x00'"),
  "ragged tokens": ({"tokens": [[1], [[1], [2, 3]]]}, r"tokens\[1\] must be a list of integers, but entry 0 is \[1\]"),
  "nested tokens": ({"tokens": [[1], np.ones((1, 2), int)]}, r"tokens\[1\] .* got an array of shape \(1, 2\)"),
  "true among ids": ({"tokens": [[1], [2, True]]}, r"tokens\[1\] must be a list of integers, but entry 1 is True"),
  "true for a prompt": ({"prompts": [[1], np.array([True])]}, r"prompts\[1\] .* entry 0 is True"),
  "true among rows": ({"rows": [0, True]}, "rows must be a list of integers, but entry 1 is True"),
  "true among limits": ({"max_new_tokens": [True, 1]}, "max_new_tokens must .* entry 0 is True"),
  "far too large": ({"tokens": [[1], [2, -(2**70)]]}, f"tokens\\[1\\] holds -{2**70}, which is no int32"),
  "a set": ({"tokens": [[1], {2, 3}]}, r"tokens\[1\] must be a list of integers, got {2, 3}"),
  "numbers as text": (
    {"logprobs": [["-1"], [-1, -1]]},
    r"logprobs\[0\] must be a list of numbers, but entry 0 is '-1'",
  ),
  "text in an array": ({"logprobs": [np.array(["-1"]), [-1, -1]]}, r"logprobs\[0\] .* entry 0 is '-1'"),
  "false": ({"logprobs": [[-1], [-1, False]]}, r"logprobs\[1\] must be a list of numbers, but entry 1 is False"),
  "false in an array": ({"logprobs": [np.array([False]), [-1, -1]]}, r"logprobs\[0\] .* entry 0 is False"),
  "nested logprobs": ({"logprobs": [[-1], [[-1], [-1]]]}, r"logprobs\[1\] must .* entry 0 is \[-1\]"),
  "a column": ({"logprobs": [[-1], np.zeros((2, 1))]}, r"logprobs\[1\] .* array of shape \(2, 1\)"),
  "keys": ({"logprobs": [{-1: "a"}, [-1, -1]]}, r"logprobs\[0\] must be a list of numbers, got {-1: 'a'}"),
  "above 0": ({"logprobs": [[-1], [0, 0.5]]}, r"logprobs\[1\] holds 0.5 at entry 1; a log-probability is at most 0"),
  "infinity": ({"draft_logprobs": [[np.inf], [0, 0]]}, r"draft_logprobs\[0\] holds inf at entry 0"),
  "no float": ({"logprobs": [[-1], [-1, -(10**400)]]}, r"logprobs\[1\] holds an integer too large for a float"),
}


@pytest.mark.parametrize("name", NOT_OF_THEIR_TYPE)
def test_fields_that_are_not_of_their_type(name):
  fields, message = NOT_OF_THEIR_TYPE[name]
  with pytest.raises(ValueError, match=message):
    Samples(**{**TWO, **fields})


def test_what_log_probabilities_may_be():
  logprobs = [[jnp.float32(-1)], np.array([5e-7, None], object)]
  drafts = [jnp.array([-1], jnp.bfloat16), [-np.inf, np.float32(-2)]]
  made = Samples(**TWO, logprobs=logprobs, draft_logprobs=drafts, labels=[np.array([None]), ["", "bonus"]])
  np.testing.assert_array_equal(np.concatenate(made.logprobs), [-1, 5e-7, np.nan])
  np.testing.assert_array_equal(np.concatenate(made.draft_logprobs), [-1, -np.inf, -2])
  assert np.concatenate(made.labels).tolist() == ["", "", "bonus"]


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
  half = Samples.read(written(tmp_path, {"prompt": "ab", "text": "cd", "tokens": [1]}), Letters())
  assert half.from_text
  np.testing.assert_array_equal(half.tokens[0], [99, 100])


def test_a_byte_order_mark_and_windows_lines(tmp_path):
  path = tmp_path / "s.jsonl"
  line = json.dumps(GOOD | {"comment": "not read"}).encode()
  path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n" + line + b"\r\n")
  assert [tokens.tolist() for tokens in Samples.read(path).tokens] == [[2], [2]]


GOOD = {"prompt_tokens": [1], "tokens": [2]}
BAD_LINES = {
  "json": (["{"], None, "line 1"),
  "list": ([GOOD, [1, 2]], None, "line 2: must be a JSON object, got list"),
  "keys": ([GOOD, {"prompt_tokens": [1]}], None, "line 2: must have 'prompt_tokens' and 'tokens'"),
  "text": ([{"prompt": "a", "text": "b"}], None, "holds text and no ids; give a tokenizer"),
  "null": ([{"prompt": "a", "text": None}], Letters(), "must be strings"),
  "round trip": ([{"prompt": "a", "text": "A"}], Letters(), "is this the target's tokenizer"),
  "middle of a token": ([{"prompt": "abc", "text": "d"}], Pairs(), "does not begin with the prompt's"),
  "some": ([{**GOOD, "row": 0}, "", GOOD], None, "line 3: has no 'row', others have"),
  "empty": ([""], None, "holds no generations"),
  "floats": (["", {"prompt_tokens": [1], "tokens": [0.5]}], None, "s.jsonl, line 2: tokens must be a list of integers"),
  "no prompt": ([GOOD, {"prompt_tokens": [], "tokens": [1]}], None, "s.jsonl, line 2: prompt_tokens is empty"),
  "row": ([{**GOOD, "row": True}], None, "s.jsonl, line 1: row=True must be a whole number from 0"),
  "negative row": ([GOOD, {**GOOD, "row": -1}], None, "s.jsonl, line 2: row=-1 must be a whole number from 0"),
  "limit": ([{**GOOD, "max_new_tokens": [5]}], None, r"line 1: max_new_tokens=\[5\] must be a whole number"),
  "label": ([GOOD, {**GOOD, "labels": ["residual-or-so"]}], None, "s.jsonl, line 2: labels holds 'residual-or-so'"),
  "logprobs": ([GOOD, {**GOOD, "logprobs": [[-1]]}], None, "s.jsonl, line 2: logprobs must be a list of numbers"),
  "two": ([GOOD, {**GOOD, "logprobs": [-1, -1]}], None, "s.jsonl, line 2: logprobs has 2 entries, .* has 1 tokens"),
  "deep": ([GOOD, "[" * 100_000], None, "s.jsonl, line 2: is nested too deeply"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_lines_that_can_not_be_read(name, tmp_path):
  lines, tokenizer, message = BAD_LINES[name]
  with pytest.raises(ValueError, match=message):
    Samples.read(written(tmp_path, *lines), tokenizer)


def test_a_file_that_is_not_utf_8(tmp_path):
  path = tmp_path / "s.jsonl"
  path.write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "\xe9"}\n')
  with pytest.raises(ValueError, match=r"s.jsonl, line 2: must be UTF-8"):
    Samples.read(path)

"""Text that an engine generated, as an audit reads it: token ids, and what else the engine says about each of them.

Reads and writes JSONL, one generation a line. Judges nothing beyond the form: whether ids exist and texts fit in the
context is for `specjax.audit.audit`, which knows the target.
"""

import dataclasses
import json
import numbers
import os
import reprlib
from collections.abc import Iterable, Mapping, Sequence, Set
from types import NoneType
from typing import Any, Protocol

import numpy as np
from jax.typing import ArrayLike

from specjax.files import replacing
from specjax.result import SampleResult

LABELS = ("accepted", "residual", "bonus")
_PER_GENERATION = {"rows": "row", "max_new_tokens": "max_new_tokens"}  # and their names in a line
_PER_TOKEN = ("labels", "logprobs", "draft_logprobs")
_ROUNDING = 0.05  # of a log-probability, which is at most 0; as coarse as bfloat16 has it


class Encoder(Protocol):
  """What is asked of a tokenizer."""

  def encode(self, text: str) -> list[int]: ...

  def decode(self, ids: Iterable[int]) -> str: ...


class Round(Protocol):
  """What is asked of a round to tell what its tokens were; `specjax.RoundInfo` has it."""

  @property
  def num_emitted(self) -> ArrayLike: ...

  @property
  def num_accepted(self) -> ArrayLike: ...

  @property
  def num_drafted(self) -> ArrayLike: ...


@dataclasses.dataclass(frozen=True, repr=False)
class Samples:
  """N generations, in the order in which they were made.

  prompts: N arrays int32[P_i], one token or more each.
  tokens: N arrays int32[n_i], the generated tokens, the stop token included; a generation may be empty.
  rows: int32[N], the row of its batch that each generation was; within a batch they go up.
  max_new_tokens: int32[N], how many tokens each was allowed.
  labels: N arrays of n_i words: what each token was in its round. "accepted": a draft that was kept; "residual": drawn
    where a draft was rejected; "bonus": drawn where nothing was drafted; "" where it isn't known.
  logprobs: N arrays float[n_i], the engine's own log-probability of each token; NaN where it isn't known.
  draft_logprobs: N arrays float[n_i], the engine's draft log-probability of each token; NaN where there was no draft.
  from_text: whether ids were made by encoding text again. The engine may have drawn other ids for the same text.

  The constructor takes lists too, and makes arrays of them; None among log-probabilities is NaN. Raises ValueError,
  naming the field and the generation, for what is not of these types, and for fields that do not fit each other.
  """

  prompts: Sequence[Any]
  tokens: Sequence[Any]
  rows: Any = None
  max_new_tokens: Any = None
  labels: Sequence[Any] | None = None
  logprobs: Sequence[Any] | None = None
  draft_logprobs: Sequence[Any] | None = None
  from_text: bool = False

  def __post_init__(self) -> None:
    given = {
      name: _sequence(name, value, "a list with an entry a generation")
      for name in ("prompts", "tokens", *_PER_GENERATION, *_PER_TOKEN)
      if (value := getattr(self, name)) is not None or name in ("prompts", "tokens")
    }
    count = len(given["prompts"])
    for name, values in given.items():
      if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries, prompts has {count}; there must be one a generation.")
    prompts, tokens = given.pop("prompts"), given.pop("tokens")
    made: dict[str, Any] = {
      "prompts": tuple(_prompt(f"prompts[{i}]", value) for i, value in enumerate(prompts)),
      "tokens": tuple(_ids(f"tokens[{i}]", value) for i, value in enumerate(tokens)),
    }
    sizes = [len(ids) for ids in made["tokens"]]
    for name, values in given.items():
      made[name] = (
        _counts(name, values)
        if name in _PER_GENERATION
        else tuple(_per_token(name, f"{name}[{i}]", values[i], size) for i, size in enumerate(sizes))
      )
    for name, value in made.items():
      object.__setattr__(self, name, value)

  def __repr__(self) -> str:
    more = [name for name in (*_PER_GENERATION, *_PER_TOKEN) if getattr(self, name) is not None]
    return f"Samples({len(self.tokens)} generations, {self.num_tokens:,} tokens{''.join(f', {name}' for name in more)})"

  @property
  def counts(self) -> np.ndarray:
    """int64[N], tokens of each generation."""
    return np.array([len(tokens) for tokens in self.tokens], np.int64)

  @property
  def num_tokens(self) -> int:
    """Generated tokens."""
    return sum(map(len, self.tokens))

  @classmethod
  def from_result(
    cls,
    result: SampleResult,
    prompt_lengths: ArrayLike,
    *,
    rounds: Sequence[Round] | None = None,
    max_new_tokens: ArrayLike | None = None,
  ) -> "Samples":
    """The generations of one batch of `specjax.sample`; row b is generation b.

    prompt_lengths: int32[B], or a scalar. max_new_tokens: the same, of the call.
    rounds: what `specjax.step` returned in every round of that batch, for the labels.
    """
    tokens, logprobs, ends = (np.asarray(value) for value in (result.tokens, result.logprobs, result.lengths))
    starts = np.broadcast_to(np.asarray(prompt_lengths), ends.shape)
    pairs = list(zip(starts, ends, strict=True))
    return cls(
      prompts=[row[:start] for row, (start, _) in zip(tokens, pairs, strict=True)],
      tokens=[row[start:end] for row, (start, end) in zip(tokens, pairs, strict=True)],
      rows=np.arange(len(ends)),
      max_new_tokens=None if max_new_tokens is None else np.broadcast_to(np.asarray(max_new_tokens), ends.shape),
      labels=None if rounds is None else _labels(rounds, len(ends)),
      logprobs=[row[start:end] for row, (start, end) in zip(logprobs, pairs, strict=True)],
    )

  @classmethod
  def concatenate(cls, parts: Sequence["Samples"]) -> "Samples":
    """The generations of several batches, one after the other; what one part lacks is left out."""
    if not parts:
      raise ValueError("parts is empty; there must be one or more.")

    def joined(name: str) -> list | None:
      values = [getattr(part, name) for part in parts]
      return None if any(value is None for value in values) else [entry for value in values for entry in value]

    fields = {name: joined(name) for name in (*_PER_GENERATION, *_PER_TOKEN)}
    from_text = any(part.from_text for part in parts)
    return cls(joined("prompts") or [], joined("tokens") or [], **fields, from_text=from_text)

  @classmethod
  def read(cls, path: str | os.PathLike[str], tokenizer: Encoder | None = None) -> "Samples":
    """Reads JSONL: an object a line with "prompt_tokens" and "tokens", or, with a tokenizer, "prompt" and "text".

    Optional: "row", "max_new_tokens", and lists with an entry a token: "labels", "logprobs", "draft_logprobs"; in all
    lines or in none. Other fields of a line are not read. Ids are to be preferred. Text is encoded again, prompt and
    all, and may come out as other ids than were drawn.

    Raises ValueError, with the number of the line, for what can't be read, and for text whose encoding does not begin
    with its prompt's or does not decode to the same text: the tokenizer is another one then, or the prompt ends in the
    middle of a token.
    """
    entries: dict[int, dict[str, Any]] = {}  # by the number of their line
    with open(path, "rb") as file:
      for number, line in enumerate(file, 1):
        try:
          if text := line.decode("utf-8-sig").strip():
            entries[number] = _entry(json.loads(text), tokenizer)
        except (ValueError, TypeError, RecursionError) as error:
          known: dict[type, str] = {UnicodeDecodeError: "must be UTF-8.", RecursionError: "is nested too deeply."}
          words = known.get(type(error), str(error))
          raise ValueError(f"{os.fspath(path)}, line {number}: {words}") from None
    if not entries:
      raise ValueError(f"{os.fspath(path)} holds no generations: it must have a JSON object a line.")
    fields: dict[str, list | None] = {}
    for name in (*_PER_GENERATION, *_PER_TOKEN):
      missing, key = [number for number, entry in entries.items() if name not in entry], _PER_GENERATION.get(name, name)
      if missing and len(missing) < len(entries):
        raise ValueError(f"{os.fspath(path)}, line {missing[0]}: has no {key!r}, others have; all must, or none.")
      fields[name] = None if missing else [entry[name] for entry in entries.values()]
    prompts, tokens = ([entry[name] for entry in entries.values()] for name in ("prompts", "tokens"))
    return cls(prompts, tokens, **fields, from_text=any(entry["from_text"] for entry in entries.values()))

  def write(self, path: str | os.PathLike[str]) -> None:
    """Writes JSONL that `read` reads."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
      for i in range(len(self.tokens)):
        file.write(json.dumps(self._line(i)) + "\n")

  def _line(self, index: int) -> dict[str, Any]:
    line: dict[str, Any] = {"prompt_tokens": self.prompts[index].tolist(), "tokens": self.tokens[index].tolist()}
    for name, key in _PER_GENERATION.items():
      if (values := getattr(self, name)) is not None:
        line[key] = int(values[index])
    for name in _PER_TOKEN:
      if (values := getattr(self, name)) is not None:
        # JSON knows no NaN.
        line[name] = [None if value != value else value for value in values[index].tolist()]
    return line


def _sequence(name: str, value: Any, what: str) -> np.ndarray | list:
  """An array with an axis or more, or a list of what is no array."""
  if hasattr(value, "__array__"):
    value = np.asarray(value)
    if value.ndim:
      return value
  elif isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping, Set)):
    return list(value)
  raise ValueError(f"{name} must be {what}, got {reprlib.repr(value)}.")


def _entries(name: str, value: Any, what: str, *allowed: type) -> np.ndarray | list:
  """An array with one axis, of one of these types, or a list in which each entry is of one. No bool is a number."""
  entries = _sequence(name, value, what)
  if isinstance(entries, np.ndarray):
    if entries.ndim > 1:
      raise ValueError(f"{name} must be {what}, got an array of shape {entries.shape}.")
    if issubclass(entries.dtype.type, allowed):
      return entries
    entries = entries.tolist()
  entries = [entry.item() if getattr(entry, "shape", None) == () else entry for entry in entries]  # numpy's and jax's
  wrong = {kind for kind in set(map(type, entries)) if kind is bool or not issubclass(kind, allowed)}
  for i, entry in enumerate(entries if wrong else ()):
    if type(entry) in wrong:
      raise ValueError(f"{name} must be {what}, but entry {i} is {reprlib.repr(entry)}.")
  return entries


def _ids(name: str, value: Any) -> np.ndarray:
  array = np.asarray(_entries(name, value, "a list of integers", numbers.Integral))
  if array.size and (array.min() < -(2**31) or array.max() >= 2**31):
    raise ValueError(f"{name} holds {array.max() if array.max() >= 2**31 else array.min()}, which is no int32.")
  return array.astype(np.int32)


def _prompt(name: str, value: Any) -> np.ndarray:
  ids = _ids(name, value)
  if not len(ids):
    raise ValueError(f"{name} is empty; it must hold one token or more, such as the beginning-of-text token.")
  return ids


def _counts(name: str, value: Any) -> np.ndarray:
  counts = _ids(name, value)
  if (counts < 0).any():
    raise ValueError(f"{name}[{int(np.argmin(counts))}]={counts.min()} must be 0 or more.")
  return counts


def _per_token(field: str, name: str, value: Any, count: int) -> np.ndarray:
  what, kind, made = ("words", str, _words) if field == "labels" else ("numbers", numbers.Real, _log_probabilities)
  entries = _entries(name, value, f"a list of {what}", kind, NoneType)
  if len(entries) != count:
    raise ValueError(f"{name} has {len(entries)} entries, but that generation has {count} tokens.")
  return made(name, entries)


def _words(name: str, entries: np.ndarray | list) -> np.ndarray:
  words = [word or "" for word in np.asarray(entries, object).tolist()]
  if unknown := set(words) - {*LABELS, ""}:
    raise ValueError(f"{name} holds {min(unknown)!r}; allowed: {', '.join(LABELS)}, or '' where it isn't known.")
  return np.array(words, "U8")  # the longest has 8 letters


def _log_probabilities(name: str, entries: np.ndarray | list) -> np.ndarray:
  try:
    values = np.array(entries, np.float64)  # None becomes NaN
  except OverflowError:
    raise ValueError(f"{name} holds an integer too large for a float.") from None
  if (above := np.flatnonzero(values > _ROUNDING)).size:
    raise ValueError(f"{name} holds {values[above[0]]:g} at entry {above[0]}; a log-probability is at most 0.")
  return values


def _entry(line: Any, tokenizer: Encoder | None) -> dict[str, Any]:
  """The fields of `Samples` that a line's object has, for its generation."""
  if not isinstance(line, Mapping):
    raise ValueError(f"must be a JSON object, got {type(line).__name__}.")
  from_text = not ("prompt_tokens" in line and "tokens" in line)
  prompt, tokens = _encoded(line, tokenizer) if from_text else (line["prompt_tokens"], line["tokens"])
  entry: dict[str, Any] = {"from_text": from_text, "prompts": _prompt("prompt_tokens", prompt)}
  entry["tokens"] = _ids("tokens", tokens)
  for name, key in _PER_GENERATION.items():
    if (value := line.get(key)) is not None:
      if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
        raise ValueError(f"{key}={reprlib.repr(value)} must be a whole number from 0 to 2**31 - 1.")
      entry[name] = value
  for name in _PER_TOKEN:
    if (value := line.get(name)) is not None:
      entry[name] = _per_token(name, name, value, len(entry["tokens"]))
  return entry


def _encoded(line: Mapping[str, Any], tokenizer: Encoder | None) -> tuple[list[int], list[int]]:
  """Ids of the line's prompt, and of its text."""
  if not ("prompt" in line and "text" in line):
    raise ValueError(f"must have 'prompt_tokens' and 'tokens', or 'prompt' and 'text'; it has {sorted(line)}.")
  if tokenizer is None:
    raise ValueError("holds text and no ids; give a tokenizer: specjax.load_tokenizer(...).")
  prompt, text = line["prompt"], line["text"]
  if not (isinstance(prompt, str) and isinstance(text, str)):
    raise ValueError("'prompt' and 'text' must be strings.")
  prompt_ids, ids = tokenizer.encode(prompt), tokenizer.encode(prompt + text)
  if ids[: len(prompt_ids)] != prompt_ids:
    raise ValueError("the encoding of prompt and text does not begin with the prompt's; give token ids.")
  if tokenizer.decode(ids) not in (prompt + text, tokenizer.decode(prompt_ids) + text):
    raise ValueError("the text does not come back when it is encoded and decoded: is this the target's tokenizer?")
  return prompt_ids, ids[len(prompt_ids) :]


def _labels(rounds: Sequence[Round], batch: int) -> list[list[str]]:
  labels: list[list[str]] = [[] for _ in range(batch)]
  for info in rounds:
    counts = np.asarray(info.num_emitted), np.asarray(info.num_accepted), np.asarray(info.num_drafted)
    for row, emitted, accepted, drafted in zip(labels, *counts, strict=True):
      block = ["accepted"] * int(accepted) + ["residual" if accepted < drafted else "bonus"]
      row.extend(block[: int(emitted)])
  return labels

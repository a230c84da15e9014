"""Text that an engine generated, as an audit reads it: token ids, and what else the engine says about each of them.

Reads and writes JSONL, one generation a line. Judges nothing beyond the form: whether ids exist and texts fit in the
context is for `specjax.audit.audit`, which knows the target.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from jax.typing import ArrayLike

from specjax.files import replacing
from specjax.result import SampleResult

LABELS = ("accepted", "residual", "bonus")
_PER_GENERATION = {"rows": "row", "max_new_tokens": "max_new_tokens"}  # and their names in a line
_PER_TOKEN = ("labels", "logprobs", "draft_logprobs")


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
  logprobs: N arrays float[n_i], the engine's own log-probability of each token.
  draft_logprobs: N arrays float[n_i], the engine's draft log-probability of each token; NaN where there was no draft.
  from_text: whether ids were made by encoding text again. The engine may have drawn other ids for the same text.

  The constructor takes lists too, and makes arrays of them. Raises ValueError, naming the generation, for
  fields that do not fit each other.
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
    def set_field(name: str, value: Any) -> None:
      object.__setattr__(self, name, value)

    set_field("prompts", tuple(_ids(f"prompts[{i}]", value) for i, value in enumerate(self.prompts)))
    set_field("tokens", tuple(_ids(f"tokens[{i}]", value) for i, value in enumerate(self.tokens)))
    count = len(self.prompts)
    for name in ("tokens", *_PER_GENERATION, *_PER_TOKEN):
      value = getattr(self, name)
      if value is not None and len(value) != count:
        raise ValueError(f"{name} has {len(value)} entries, prompts has {count}; there must be one a generation.")
    for i, prompt in enumerate(self.prompts):
      if not len(prompt):
        raise ValueError(f"prompts[{i}] is empty; it must hold one token or more, such as the beginning-of-text token.")
    for name in _PER_GENERATION:
      if getattr(self, name) is not None:
        values = _ids(name, getattr(self, name))
        if (values < 0).any():
          raise ValueError(f"{name}[{int(np.argmin(values))}]={values.min()} must be 0 or more.")
        set_field(name, values)
    for name in _PER_TOKEN:
      if getattr(self, name) is not None:
        set_field(name, tuple(self._per_token(name, i, value) for i, value in enumerate(getattr(self, name))))

  def _per_token(self, name: str, index: int, value: Any) -> np.ndarray:
    where, count = f"{name}[{index}]", len(self.tokens[index])
    if len(value) != count:
      raise ValueError(f"{where} has {len(value)} entries, but that generation has {count} tokens.")
    if name == "labels":
      words = np.array(["" if word is None else word for word in value], dtype="U8")
      if unknown := sorted(set(words.tolist()) - {*LABELS, ""}):
        raise ValueError(f"{where} holds {unknown[0]!r}; allowed: {', '.join(LABELS)}, or '' where it isn't known.")
      return words
    try:
      return np.array([np.nan if number is None else number for number in value], np.float64)
    except (TypeError, ValueError):
      raise ValueError(f"{where} must hold numbers, one a token.") from None

  def __repr__(self) -> str:
    more = [name for name in (*_PER_GENERATION, *_PER_TOKEN) if getattr(self, name) is not None]
    return f"Samples({len(self.tokens)} generations, {self.num_tokens:,} tokens{''.join(f', {name}' for name in more)})"

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
    lines or in none. Ids are to be preferred. Text is encoded again, prompt and all, and may come out as other ids than
    were drawn.

    Raises ValueError, with the number of the line, for what can't be read, and for text whose encoding does not begin
    with its prompt's or does not decode to the same text: the tokenizer is another one then, or the prompt ends in the
    middle of a token.
    """
    entries, from_text = [], False
    with open(path, encoding="utf-8") as file:
      for number, line in enumerate(file, 1):
        if not line.strip():
          continue
        try:
          entry = json.loads(line)
          from_text |= "tokens" not in entry
          entries.append(_entry(entry, tokenizer))
        except (ValueError, TypeError) as error:
          raise ValueError(f"{os.fspath(path)}, line {number}: {error}") from None
    if not entries:
      raise ValueError(f"{os.fspath(path)} holds no generations: it must have a JSON object a line.")
    fields: dict[str, list | None] = {}
    for name, key in (_PER_GENERATION | dict(zip(_PER_TOKEN, _PER_TOKEN, strict=True))).items():
      values = [entry.get(key) for entry in entries]
      missing = [i for i, value in enumerate(values) if value is None]
      if missing and len(missing) < len(values):
        raise ValueError(f"{os.fspath(path)}: generation {missing[0]} has no {key!r}, others have; all must, or none.")
      fields[name] = None if missing else values
    try:
      return cls([e["prompt_tokens"] for e in entries], [e["tokens"] for e in entries], **fields, from_text=from_text)
    except ValueError as error:
      raise ValueError(f"{os.fspath(path)}: {error}") from None

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


def _ids(name: str, value: Any) -> np.ndarray:
  array = np.asarray(value)
  if array.ndim == 1 and not array.size:
    return np.zeros(0, np.int32)
  if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
    raise ValueError(f"{name} must be a list of integers, got {array.dtype} of shape {array.shape}.")
  if array.min() < -(2**31) or array.max() >= 2**31:
    raise ValueError(f"{name} holds {max(array.max(), -array.min())}, which is no int32.")
  return array.astype(np.int32)


def _entry(entry: Any, tokenizer: Encoder | None) -> dict[str, Any]:
  """The line's object, with ids."""
  if not isinstance(entry, Mapping):
    raise ValueError(f"must be a JSON object, got {type(entry).__name__}.")
  if "prompt_tokens" in entry and "tokens" in entry:
    return dict(entry)
  if not ("prompt" in entry and "text" in entry):
    raise ValueError(f"must have 'prompt_tokens' and 'tokens', or 'prompt' and 'text'; it has {sorted(entry)}.")
  if tokenizer is None:
    raise ValueError("holds text and no ids; give a tokenizer: specjax.load_tokenizer(...).")
  prompt, text = entry["prompt"], entry["text"]
  if not (isinstance(prompt, str) and isinstance(text, str)):
    raise ValueError("'prompt' and 'text' must be strings.")
  prompt_ids, ids = tokenizer.encode(prompt), tokenizer.encode(prompt + text)
  if ids[: len(prompt_ids)] != prompt_ids:
    raise ValueError("the encoding of prompt and text does not begin with the prompt's; give token ids.")
  if tokenizer.decode(ids) not in (prompt + text, tokenizer.decode(prompt_ids) + text):
    raise ValueError("the text does not come back when it is encoded and decoded: is this the target's tokenizer?")
  return {**entry, "prompt_tokens": prompt_ids, "tokens": ids[len(prompt_ids) :]}


def _labels(rounds: Sequence[Round], batch: int) -> list[list[str]]:
  labels: list[list[str]] = [[] for _ in range(batch)]
  for info in rounds:
    counts = np.asarray(info.num_emitted), np.asarray(info.num_accepted), np.asarray(info.num_drafted)
    for row, emitted, accepted, drafted in zip(labels, *counts, strict=True):
      block = ["accepted"] * int(accepted) + ["residual" if accepted < drafted else "bonus"]
      row.extend(block[: int(emitted)])
  return labels

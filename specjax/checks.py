"""The caller's values, looked at before anything compiles: each error says what was given and what is allowed.

Values of tracers (under an outer `jax.jit`) can't be looked at; their shapes and types are. Nothing is clipped or
repaired here.
"""

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from specjax.language_model import LanguageModel
from specjax.warp import Warp

ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)  # a tracer is a jax.Array, but no ArrayLike
MAX_VOCAB_MULTIPLE = 1024  # vocabularies are padded to multiples of powers of two up to this
MAX_LENGTH = 2**30  # positions are int32, and buffers are rounded up to a power of two


@dataclasses.dataclass(frozen=True)
class Request:
  """A checked call of `sample`: arrays of the right type and shape, and the sizes that decide about buffers."""

  prompt_tokens: Any  # int32[B, P], a numpy array unless traced
  prompt_lengths: Any  # int32[B]
  limit: Any  # int32[B]
  stop_ids: Any  # int32[E]
  warp: Warp  # fields float32[B], int32[B]
  longest: int  # P + max(max_new_tokens)

  @property
  def width(self) -> int:
    return self.prompt_tokens.shape[1]

  def pad_to(self, max_length: int) -> Any:
    """The prompts in a buffer int32[B, max_length]."""
    pad = ((0, 0), (0, max_length - self.width))
    return (jnp if isinstance(self.prompt_tokens, jax.core.Tracer) else np).pad(self.prompt_tokens, pad)


def request(
  target: LanguageModel,
  drafter: Any,
  prompt_tokens: ArrayLike,
  key: Array,
  prompt_lengths: ArrayLike | None,
  max_new_tokens: ArrayLike,
  num_draft_tokens: int,
  warp: Warp,
  eos_id: int | Sequence[int] | None,
  prefill_chunk: int,
) -> Request:
  """Checks every argument of `sample` against the others; raises TypeError or ValueError."""
  _target(target)
  _leaves("target", target)
  count("num_draft_tokens", num_draft_tokens, 0)
  count("prefill_chunk", prefill_chunk, 1)
  prompts = _prompts(prompt_tokens)
  batch, width = prompts.shape
  _key(key, batch)
  warp = warp_settings(warp, batch)
  lengths = _lengths(prompt_lengths, batch, width)
  _range("prompt_tokens", _inside(prompts, lengths), 0, target.vocab_size - 1, "the target's vocabulary")
  max_new = _max_new_tokens(max_new_tokens, batch, width)
  longest = width + int(np.max(max_new, initial=0))
  limit = lengths + max_new
  for what, model in _models(target, drafter if num_draft_tokens else None):
    _context(what, model, limit)
  if num_draft_tokens:
    _drafter(target, drafter)
  # One type for all, so that it decides about no program; padding that int32 can't hold may wrap around.
  return Request(prompts.astype(np.int32), lengths, limit, _stop_ids(eos_id, target.vocab_size), warp, longest)


def warp_settings(warp: Warp, batch: int) -> Warp:
  """Checks the fields of a warp for B rows; returns them as float32[B] and int32[B], numpy arrays unless traced."""
  if not isinstance(warp, Warp):
    raise TypeError(f"warp must be a specjax.Warp, got {type(warp).__name__}.")
  allowed = {
    "temperature": (lambda x: (x >= 0) & (x < np.inf), "a finite float32 >= 0 (0 means argmax)"),
    "top_k": (lambda x: (x >= 0) & (x < 2**31), "an integer from 0 (keeps all) to 2**31 - 1"),
    "top_p": (lambda x: (x > 0) & (x <= 1), "a number in (0, 1]"),
    "min_p": (lambda x: (x >= 0) & (x <= 1), "a number in [0, 1]"),
  }
  fields: dict[str, Any] = {}
  for name, (is_allowed, words) in allowed.items():
    value, field_dtype = getattr(warp, name), np.int32 if name == "top_k" else np.float32
    if not isinstance(value, ARRAYS):
      raise TypeError(f"warp.{name}={value!r} must be {words}, or an array of them.")
    if np.shape(value) not in ((), (batch,)):
      raise ValueError(
        f"warp.{name} has shape {np.shape(value)}; allowed: a scalar or one value for each of {batch} rows."
      )
    dtype = jnp.result_type(value)
    if not (jnp.issubdtype(dtype, jnp.integer) or (name != "top_k" and jnp.issubdtype(dtype, jnp.floating))):
      raise TypeError(f"warp.{name} has type {dtype}; it must be {words}.")
    if isinstance(value, jax.core.Tracer):
      fields[name] = jnp.broadcast_to(value.astype(field_dtype), (batch,))
      continue
    given = np.atleast_1d(np.asarray(value))
    with np.errstate(over="ignore"):  # judged as the program will see it
      values = given if name == "top_k" else given.astype(np.float32)
    bad = np.flatnonzero(np.logical_not(is_allowed(values)))
    if bad.size:
      raise ValueError(f"warp.{name}={given[bad[0]]}{_at_row(bad[0], given)}; it must be {words}.")
    fields[name] = np.broadcast_to(values.astype(field_dtype), (batch,))
  return Warp(**fields)


def vocabularies_match(draft: int, target: int) -> bool:
  """Whether two vocabulary sizes are equal but for padding to a multiple of a power of two, at most 1024."""
  small, large = sorted((draft, target))
  multiples = [1 << i for i in range(1, MAX_VOCAB_MULTIPLE.bit_length())]
  return small == large or any(-(-small // m) * m == large for m in multiples)


def _target(target: LanguageModel) -> None:
  if not isinstance(target, LanguageModel):
    raise TypeError(
      f"target must be a specjax.LanguageModel, got {type(target).__name__}. Use specjax.load_model(...), or build one."
    )


def _leaves(what: str, value: Any) -> None:
  for leaf in jax.tree.leaves(value):
    if not isinstance(leaf, ARRAYS):
      raise TypeError(f"{what} must be a pytree of arrays, but holds {leaf!r}; pass an instance, with models loaded.")


def _models(target: LanguageModel, drafter: Any) -> list[tuple[str, LanguageModel]]:
  draft = getattr(drafter, "model", None)
  return [("target", target)] + ([("draft model", draft)] if isinstance(draft, LanguageModel) else [])


def _drafter(target: LanguageModel, drafter: Any) -> None:
  missing = [name for name in ("init", "prefill", "propose") if not callable(getattr(drafter, name, None))]
  if missing:
    hint = " Wrap a model: specjax.ModelDrafter(model)." if isinstance(drafter, LanguageModel) else ""
    raise TypeError(
      f"drafter={type(drafter).__name__} lacks {', '.join(missing)}; pass specjax.NGramDrafter(), "
      f"specjax.ModelDrafter(...), or num_draft_tokens=0 for plain sampling.{hint}"
    )
  _leaves("drafter", drafter)
  for _, draft in _models(target, drafter)[1:]:
    if not vocabularies_match(draft.vocab_size, target.vocab_size):
      raise ValueError(
        f"the draft model has {draft.vocab_size} tokens, the target {target.vocab_size}: they must share a tokenizer "
        "(sizes may differ by padding to a multiple of a power of two)."
      )
    hashes = draft.tokenizer_hash, target.tokenizer_hash
    if None not in hashes and hashes[0] != hashes[1]:
      raise ValueError(
        "the draft model and the target come with different tokenizers; their token ids mean other words."
      )


def _context(what: str, model: LanguageModel, limit: Any) -> None:
  if model.context_length is None or isinstance(limit, jax.core.Tracer):
    return
  row = int(np.argmax(limit))
  if limit[row] > model.context_length:
    raise ValueError(
      f"row {row}: prompt and max_new_tokens make {limit[row]} tokens, "
      f"the {what}'s context holds {model.context_length}."
    )


def _prompts(prompt_tokens: ArrayLike) -> Any:
  try:
    prompts = prompt_tokens if isinstance(prompt_tokens, jax.core.Tracer) else np.asarray(prompt_tokens)
  except ValueError as error:
    raise ValueError(
      "prompt_tokens has rows of different lengths; it must be int32[B, P]: pad them on the right, pass prompt_lengths."
    ) from error
  if prompts.ndim != 2 or prompts.shape[0] < 1 or prompts.shape[1] < 1:
    raise ValueError(
      f"prompt_tokens has shape {prompts.shape} and type {prompts.dtype}; it must be int32[B, P], B >= 1 and P >= 1: "
      "a row of token ids for each prompt, as tokenizer.encode(text) gives one."
    )
  if not jnp.issubdtype(prompts.dtype, jnp.integer):
    raise TypeError(f"prompt_tokens has type {prompts.dtype}; it must hold integers.")
  return prompts


def _inside(prompts: Any, lengths: Any) -> Any:
  """The prompts with padding replaced by the row's first token: padding may hold any value."""
  if isinstance(prompts, jax.core.Tracer):
    return prompts
  if isinstance(lengths, jax.core.Tracer):
    return prompts[:, :1]  # all that is known to be no padding
  return np.where(np.arange(prompts.shape[1]) < lengths[:, None], prompts, prompts[:, :1])


def _lengths(prompt_lengths: ArrayLike | None, batch: int, width: int) -> Any:
  if prompt_lengths is None:
    return np.full(batch, width, np.int32)
  lengths = _integers("prompt_lengths", prompt_lengths, batch)
  if np.shape(lengths) != (batch,):
    raise ValueError(f"prompt_lengths has shape {np.shape(lengths)}; it must be int32[{batch}], one a row.")
  return _range("prompt_lengths", lengths, 1, width, "the width of prompt_tokens")


def _max_new_tokens(max_new_tokens: ArrayLike, batch: int, width: int) -> Any:
  if isinstance(max_new_tokens, jax.core.Tracer):
    raise TypeError(
      "max_new_tokens is traced, but it decides the shape of the result: pass an int or a numpy array (close over it "
      "or make it a static argument); within a program use specjax.init and specjax.step, whose limit is dynamic."
    )
  values = _integers("max_new_tokens", max_new_tokens, batch)
  return _range("max_new_tokens", values, 0, MAX_LENGTH - width, f"with the prompt at most {MAX_LENGTH}")


def _integers(name: str, value: ArrayLike, batch: int) -> Any:
  value = value if isinstance(value, jax.core.Tracer) else np.asarray(value)
  if not jnp.issubdtype(value.dtype, jnp.integer):
    raise TypeError(f"{name}={value} has type {value.dtype}; it must hold integers that fit int32.")
  if value.shape not in ((), (batch,)):
    raise ValueError(f"{name} has shape {value.shape}; allowed: a scalar or one value for each of {batch} rows.")
  return value


def _range(name: str, values: Any, low: int, high: int, what: str) -> Any:
  """The values as int32, all in low..high."""
  if isinstance(values, jax.core.Tracer):
    return values.astype(jnp.int32)
  bad = np.argwhere((values < low) | (values > high))
  if len(bad):  # not bad.size, which is 0 for a scalar
    where = f"[{', '.join(map(str, bad[0]))}]" if values.ndim else ""
    raise ValueError(f"{name}{where}={values[tuple(bad[0])]} is out of range: allowed {low} to {high} ({what}).")
  return values.astype(np.int32)


def count(name: str, value: int, low: int) -> int:
  """The static size as a Python int, at least `low`."""
  if isinstance(value, bool) or not isinstance(value, numbers.Integral):
    raise TypeError(f"{name}={value!r} must be a Python int: it is static.")
  if value < low:
    raise ValueError(f"{name}={value} must be at least {low}.")
  return int(value)


def _key(key: Array, batch: int) -> None:
  if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
    kind = getattr(key, "dtype", type(key).__name__)
    raise TypeError(f"key has type {kind}; it must be a typed key: jax.random.key(seed).")
  if key.shape not in ((), (batch,)):
    raise ValueError(f"key has shape {key.shape}; allowed: a single key, or one key for each of {batch} rows.")


def _stop_ids(eos_id: int | Sequence[int] | None, vocab_size: int) -> np.ndarray:
  ids = () if eos_id is None else tuple(eos_id) if isinstance(eos_id, Sequence) else (eos_id,)
  for token in ids:
    if isinstance(token, bool) or not isinstance(token, numbers.Integral):
      raise TypeError(f"eos_id={eos_id!r} must be an int, a sequence of ints, or None.")
  return _range("eos_id", np.array(ids, object), 0, vocab_size - 1, "the target's vocabulary")


def _at_row(row: int, values: np.ndarray) -> str:
  return f" at row {row}" if values.size > 1 else ""

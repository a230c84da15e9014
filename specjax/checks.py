"""The caller's values, looked at before anything compiles: each error says what was given and what is allowed.

Values of tracers (under an outer `jax.jit`) can't be looked at; their shapes and types are. So are those of what the
caller's drafter and rule return, while they are traced; `specjax.language_model.run` sees to the models. Nothing is
repaired here, and nothing clipped but a traced limit.
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

from specjax.language_model import LanguageModel, require_same_types, short_types
from specjax.verify import Verdict
from specjax.warp import Warp

ARRAYS = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)  # a tracer is a jax.Array, but no ArrayLike
MAX_VOCAB_MULTIPLE = 1024  # vocabularies are padded to multiples of powers of two up to this
INDEPENDENT_KEYS = ("threefry2x32", "fry")
MAX_LENGTH = 2**30  # positions are int32, and buffers are rounded up to a power of two
MIN_SLOTS = 128
PREFILL_CHUNK = 64  # prompt tokens a pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Request:
  """A checked call of `init` or `sample`: arrays of the right type and shape, unless traced numpy's; static sizes."""

  target: LanguageModel
  drafter: Any  # None where nothing is drafted
  tokens: Any  # int32[B, L], the prompts in a buffer
  prompt_lengths: Any  # int32[B]
  limit: Any  # int32[B], length at which the row ends
  key: Array  # one key, or key[B]
  stop_ids: Any  # int32[E]
  warp: Warp  # fields float32[B], int32[B]
  num_draft_tokens: int = dataclasses.field(metadata={"static": True})
  prefill_chunk: int = dataclasses.field(metadata={"static": True})


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
  max_length: int | None,
  prefill_chunk: int,
) -> tuple[Request, int | None]:
  """Checks every argument against the others; raises TypeError or ValueError.

  Returns the request and P + max(max_new_tokens), the width of the result, or None where that is traced.
  """
  if jax.dtypes.canonicalize_dtype(np.int64) == np.int64:
    raise ValueError(
      "jax_enable_x64 is on, but positions are int32 and laws float32 here: call it within jax.enable_x64(False)."
    )
  gamma, chunk = count("num_draft_tokens", num_draft_tokens, 0), count("prefill_chunk", prefill_chunk, 1)
  drafter = models(target, drafter, gamma)
  prompts = _prompts(prompt_tokens)
  batch, width = prompts.shape
  if target.placement is not None and batch % (parts := target.placement.parts("batch")):
    raise ValueError(
      f"prompt_tokens has {batch} rows, which {parts} devices can't share evenly: add rows with max_new_tokens of 0, "
      f"or place the target on a mesh with a smaller axis for rows than in {dict(target.placement.mesh.shape)}."
    )
  row_key(key, batch)
  warp = warp_settings(warp, batch)
  lengths = _lengths(prompt_lengths, batch, width)
  _range("prompt_tokens", _inside(prompts, lengths), 0, target.num_ids - 1, "the target's vocabulary")
  max_new = _max_new_tokens(max_new_tokens, batch, width)
  longest = None if isinstance(max_new, jax.core.Tracer) else width + int(np.max(max_new, initial=0))
  max_length = _max_length(max_length, longest, width, gamma, chunk)
  if longest is None:
    max_new = jnp.minimum(max_new, max_length - gamma - 1 - lengths)  # a sum of the two may not fit int32
  limit = lengths + max_new
  for what, model in _models(target, drafter):
    _context(what, model, limit)
  stops = stop_ids(eos_id, target.num_ids)
  # One type for all, so that it decides about no program; padding that int32 can't hold may wrap around.
  pad = (jnp if isinstance(prompts, jax.core.Tracer) else np).pad
  tokens = pad(prompts.astype(np.int32), ((0, 0), (0, max_length - width)))
  return Request(target, drafter, tokens, lengths, limit, key, stops, warp, gamma, chunk), longest


def models(target: LanguageModel, drafter: Any, num_draft_tokens: int) -> Any:
  """Checks that the target is a model and the drafter fits it; returns the drafter, None where nothing is drafted."""
  if not isinstance(target, LanguageModel):
    raise TypeError(
      f"target must be a specjax.LanguageModel, got {type(target).__name__}. Use specjax.load_model(...), or build one."
    )
  _leaves("target", target)
  count("target.vocab_size", target.vocab_size, 1)
  if num_draft_tokens == 0:
    return None
  _drafter(target, drafter)
  return drafter


def proposal(drafter: Any, value: Any, state: Any, sizes: tuple[int, int, int]) -> None:
  """Checks the types of what a drafter proposes from `state`; sizes: B, gamma, V."""
  batch, gamma, vocab_size = sizes
  allowed = {
    "tokens": f"int32[{batch},{gamma}]",
    "log_q": f"float32[{batch},{gamma},{vocab_size}]",
    "num_drafted": f"int32[{batch}]",
  }
  for name, words in allowed.items():
    given = short_types(getattr(value, name))
    if given != words:
      raise TypeError(f"{type(drafter).__name__}.propose returned {name}: {given}; it must be {words}.")
  require_same_types(f"{type(drafter).__name__}.propose returned a state", state, value.state)


def verdict(rule: Any, value: Any, batch: int) -> None:
  """Checks the types of a rule's verdict over B rows."""
  allowed = short_types(np.zeros(batch, np.int32))
  if isinstance(value, Verdict) and short_types(value[:2]) == (allowed, allowed):
    return
  one_row = jax.tree.map(lambda x: short_types(jax.ShapeDtypeStruct(x.shape[1:], x.dtype)), value)
  raise TypeError(
    f"the rule {getattr(rule, '__name__', rule)} returned {one_row} for a row; it must return "
    "specjax.verify.Verdict(num_accepted, next_token), two int32 scalars: cast with jnp.int32(...)."
  )


def slots(prompt_length: int, limit: int, num_draft_tokens: int, prefill_chunk: int = PREFILL_CHUNK) -> int:
  """Slots that buffers and caches need: XLA clamps a write past the end, and so overwrites good rows."""
  return max(limit + num_draft_tokens + 1, prompt_length - 1 + prefill_chunk)


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
    if isinstance(value, (list, tuple)) and all(isinstance(entry, numbers.Real) for entry in value):
      value = np.array(value)
    if not isinstance(value, ARRAYS):
      raise TypeError(f"warp.{name}={value!r} must be {words}, or an array of them: numpy.array([...]).")
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
    try:
      with np.errstate(over="ignore"):  # judged as the program will see it
        values = given if name == "top_k" else given.astype(np.float32)
    except OverflowError as error:
      raise ValueError(f"warp.{name} holds an int beyond any float; it must be {words}.") from error
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
  if getattr(drafter, "model", drafter) is None:  # no leaf
    raise TypeError(f"{type(drafter).__name__}.model is None; it must be a specjax.LanguageModel: load it first.")
  for _, draft in _models(target, drafter)[1:]:
    count("the draft model's vocab_size", draft.vocab_size, 1)
    if not vocabularies_match(draft.num_ids, target.num_ids):
      raise ValueError(
        f"the draft model has {draft.num_ids} tokens, the target {target.num_ids}: they must share a tokenizer "
        "(sizes may differ by padding to a multiple of a power of two)."
      )
    own, mesh = (getattr(model.placement, "mesh", None) for model in (draft, target))
    if own != mesh:
      where = [f"on {dict(m.shape)}" if m is not None else "on no mesh" for m in (own, mesh)]
      raise ValueError(
        f"the draft model is {where[0]}, the target {where[1]}: place both on one, "
        "specjax.sharding.shard(specjax.ModelDrafter(...), mesh)."
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
  if prompts.dtype.kind in "US":
    raise TypeError("prompt_tokens holds text; it must hold token ids: encode it, [tokenizer.encode(text)].")
  if prompts.ndim == 1 and len(prompts):
    batch = "[prompt_tokens]" if isinstance(prompt_tokens, (list, tuple)) else "prompt_tokens[None]"
    raise ValueError(
      f"prompt_tokens has shape {prompts.shape}, one axis; it must be int32[B, P]: add a batch axis, {batch}."
    )
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
  values = _integers("max_new_tokens", max_new_tokens, batch)
  return _range("max_new_tokens", values, 0, MAX_LENGTH - width, f"with the prompt at most {MAX_LENGTH}")


def _max_length(max_length: int | None, longest: int | None, width: int, gamma: int, chunk: int) -> int:
  """The buffers' slots: what was asked for, if it is enough, or what is needed, rounded up to a power of two."""
  need = slots(width, longest or width, gamma, chunk)
  if max_length is not None:
    if (max_length := count("max_length", max_length, 1)) > MAX_LENGTH:
      raise ValueError(f"max_length={max_length} must be at most {MAX_LENGTH}: positions are int32.")
    if max_length < need:
      raise ValueError(f"max_length={max_length} is too small: these prompts and limits take {need} slots.")
    return max_length
  if longest is None:
    raise TypeError(
      "max_new_tokens is traced, so the buffers can't be sized by it: pass max_length, an int of at least the prompts' "
      "width + max(max_new_tokens) + num_draft_tokens + 1."
    )
  return 1 << max(need - 1, MIN_SLOTS - 1).bit_length()


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


def whole(name: str, value: Any, low: int) -> None:
  """Raises TypeError or ValueError unless it is a whole number, at least `low`."""
  if isinstance(value, bool) or not isinstance(value, numbers.Integral):
    raise TypeError(f"{name}={value!r} must be a whole number of {low} or more.")
  if value < low:
    raise ValueError(f"{name}={value} must be {low} or more.")


def row_key(key: Array, batch: int) -> None:
  """Raises TypeError or ValueError unless it is a typed key, or one for each row, whose rows draw independently."""
  if not (isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)):
    kind = getattr(key, "dtype", type(key).__name__)
    raise TypeError(f"key has type {kind}; it must be a typed key: jax.random.key(seed).")
  if (kind := str(jax.random.key_impl(key))) not in INDEPENDENT_KEYS:
    raise ValueError(
      f"key is of the implementation {kind!r}, whose draws under vmap all come from the first row's key: rows would "
      f"not be independent. Allowed: {', '.join(INDEPENDENT_KEYS)}; jax.random.key(seed, impl='threefry2x32') is one."
    )
  if key.shape not in ((), (batch,)):
    raise ValueError(f"key has shape {key.shape}; allowed: a single key, or one key for each of {batch} rows.")


def stop_ids(eos_id: int | Sequence[int] | None, num_ids: int) -> np.ndarray:
  """eos_id as int32[E]."""
  ids = () if eos_id is None else tuple(eos_id) if np.iterable(eos_id) and not isinstance(eos_id, str) else (eos_id,)
  for token in ids:
    if isinstance(token, bool | np.bool_) or not isinstance(token, numbers.Integral):
      raise TypeError(f"eos_id={eos_id!r} must be an int, a sequence of ints, or None.")
  return _range("eos_id", np.array(ids, object), 0, num_ids - 1, "the target's vocabulary")


def _at_row(row: int, values: np.ndarray) -> str:
  return f" at row {row}" if values.size > 1 else ""

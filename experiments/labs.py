"""Where planted faults are looked for in text: a model, prompts and laws, or what else a fault needs to be seen.

`Lab.of_toys` is of tiny languages, `Lab.load` of a real model. Checks and the table are experiments.mutants'.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

import specjax
from specjax.audit import Samples, Stream
from specjax.audit.engine import Engine
from specjax.audit.mutants import Mutant
from specjax.checks import slots
from specjax.language_model import LanguageModel
from specjax.models import tabular
from specjax.tasks.prompts import prompts, right_padded
from specjax.warp import Warp

PADDED, STATE, FULL, STOPS = "a draft model with more tokens", "a state", "full buffers", "frequent stop tokens"
LONG, HOT, SURE = "longer texts", "hot texts", "longer texts and blocks of a draft model that is too sure"
NEEDS = {  # what the text of other labs does not show, or not soon
  "padded vocabulary cut late": PADDED,
  "recurrent state not rolled back": STATE,
  "cache without slack": FULL,
  "stop token overrun": STOPS,
  "u too small": LONG,
  "block: weight without cap": LONG,
  "q before the warp": LONG,
  "anticipating draft length": LONG,
  "draft noise used again for the residual": LONG,
  "drafts in low precision": HOT,
  "block: token residual": SURE,
  "block: noise by position": SURE,
}
LAWS = (1.0, 1.0), (0.7, 1.0), (1.5, 0.8), (1.0, 1.0), (0.0, 1.0)
PREFILL_CHUNK = 8  # so short that prompts leave no slack in the caches


def scaled(model: LanguageModel, factor: float) -> LanguageModel:
  """A draft model that is less sure than the model, or surer; it costs as much, and needs no other weights."""

  def apply(params, tokens, cache, start):
    logits, cache = model.apply(params, tokens, cache, start)
    return factor * logits, cache

  return dataclasses.replace(model, apply=apply)


def padded(target: LanguageModel, draft: LanguageModel) -> tuple[LanguageModel, LanguageModel]:
  """The target without its last token, which the other drafts often; the one before is seldom said."""

  def target_apply(params, tokens, cache, start):
    logits, cache = target.apply(params, tokens, cache, start)
    return _last_token(logits[..., :-1], below=3.0), cache

  def draft_apply(params, tokens, cache, start):
    logits, cache = draft.apply(params, tokens, cache, start)
    return _last_token(logits, below=1.0), cache

  cut = dataclasses.replace(target, apply=target_apply, vocab_size=target.vocab_size - 1)
  return cut, dataclasses.replace(draft, apply=draft_apply)


def _last_token(logits: jax.Array, below: float) -> jax.Array:
  """Its logit is so much below the highest."""
  return logits.at[..., -1].set(logits.max(-1) - below)


def with_a_state(model: LanguageModel) -> LanguageModel:
  """The model with a state in place of `start`: a pass goes on behind the last one, unless the state is rewound."""

  def apply(params, tokens, state, start):
    del start
    cache, position = state
    logits, cache = model.apply(params, tokens, cache, position)
    return logits, (cache, position + tokens.shape[1])

  def init_cache(params, batch, max_length):
    return model.init_cache(params, batch, max_length), jnp.zeros(batch, jnp.int32)

  return dataclasses.replace(model, apply=apply, init_cache=init_cache, rewind=lambda state, length: (state[0], length))


@functools.lru_cache(maxsize=1)
def _loaded(name: str) -> tuple[LanguageModel, Any]:
  return specjax.load_model(name), specjax.load_tokenizer(name)


@dataclasses.dataclass(frozen=True)
class Lab:
  """A model, prompts for it, and laws of several kinds in each batch."""

  config: ml_collections.ConfigDict
  target: LanguageModel
  draft: LanguageModel
  prompts: list[list[int]]
  eos_ids: tuple[int, ...]
  most: int  # tokens
  needs: str | None = None  # one of the values of NEEDS

  @classmethod
  def load(cls, config: ml_collections.ConfigDict, needs: str | None = None) -> "Lab":
    """config.model, and prompts from a few tasks; needs: one of the values of NEEDS."""
    target, tokenizer = _loaded(config.model)
    texts = [tokenizer.encode(prompt.text) for prompt in prompts("mixed", config.rows, config.seed)]
    cut = [ids[: 16 + 8 * (i % 5)] for i, ids in enumerate(texts)]  # ragged
    draft, stop_ids = scaled(target, 2.0 if needs == SURE else 0.6), tuple(tokenizer.eos_ids)
    if needs == PADDED:
      target, draft = padded(target, draft)
    if needs == STATE:
      target = with_a_state(target)
    if needs == STOPS:
      stop_ids = tuple({*stop_ids, *tokenizer.encode("."), *tokenizer.encode("\n"), *tokenizer.encode(",")})
    if needs == FULL:
      cut, stop_ids = [ids[: 2 * PREFILL_CHUNK] for ids in texts], ()
    return cls(config, target, draft, cut, stop_ids, config.tokens, needs)

  @classmethod
  def of_toys(cls, config: ml_collections.ConfigDict, needs: str | None = None) -> "Lab":
    """A tiny language and one much like it, or what a fault needs to be seen. The last token ends a text, but where
    buffers are to be filled."""
    size = 13 if needs == PADDED else 16
    key, random = jax.random.key(config.seed), np.random.default_rng(config.seed)
    target = tabular.tabular(jax.random.fold_in(key, 0), size)
    noise = jax.random.normal(jax.random.fold_in(key, 1), target.params.shape)
    draft = tabular.from_table(target.params + 1.2 * noise)
    if needs == SURE:
      draft = scaled(target, 2.0)
    if needs == PADDED:
      draft = tabular.tabular(jax.random.fold_in(key, 2), 16)
    if needs == STATE:
      target = tabular.recurrent(target)
    lengths = [PREFILL_CHUNK if needs == FULL else 1 + i % 8 for i in range(config.toy_rows)]
    prompts = [random.integers(0, size - 1, length).tolist() for length in lengths]
    stop_ids = () if needs == FULL else (size - 1,)
    return cls(config, target, draft, prompts, stop_ids, config.toy_tokens, needs)

  def tokens_needed(self, mutant: Mutant) -> dict[str, Any]:
    """Generates, audits all so far, and doubles it, until the audit says that there is a fault, or to `most`.

    Returns "needed": the tokens after which the e-process crossed its level, or all where another test was first; None
    if nothing was found. "tokens": how many there were. "unchanged": whether the first batch is that of the sound
    engine, from the same keys; then there is nothing to find, and no more is made.
    """
    alpha, batches = self.config.alpha, 0
    stream = Stream(self.target, draft=self.draft, eos_id=self.eos_ids, noise="float32", alpha=alpha)
    while True:
      made = [self.generate(mutant.engine, index) for index in range(batches, max(1, 2 * batches))]
      batches += len(made)
      text = Samples.concatenate([samples for samples, _ in made])
      if batches == 1 and all(map(np.array_equal, text.tokens, self.sound)):
        return {"needed": None, "tokens": text.num_tokens, "unchanged": True}
      stream, found = stream.add(text, warp=jax.tree.map(lambda *fields: np.concatenate(fields), *(w for _, w in made)))
      crossed = found.evidence.crossed if found.evidence else None
      if found.ok is False or crossed:
        return {"needed": crossed or found.tokens, "tokens": found.tokens, "unchanged": False}
      if 2 * batches * int(self.limits.sum()) > self.most:
        return {"needed": None, "tokens": found.tokens, "unchanged": False}

  @property
  def new_tokens(self) -> int:
    """At most in a row; where buffers are to be filled, so few that many rows do."""
    if self.needs == FULL:
      return 8
    return self.config.new_tokens * (3 if self.needs in (LONG, SURE) else 1)

  @property
  def num_draft_tokens(self) -> int:
    """At most in a round."""
    return self.config.num_draft_tokens * (2 if self.needs == SURE else 1)

  @property
  def laws(self) -> Sequence[tuple[float, float]]:
    """Temperature and top_p of rows in turn."""
    return {HOT: [(1.5, 1.0)], SURE: [(1.0, 1.0)]}.get(self.needs or "", LAWS)

  @property
  def limits(self) -> np.ndarray:
    """int[B]: ragged, since a result ends with the longest, whatever went on behind it."""
    return self.new_tokens - 3 * np.arange(len(self.prompts)) % 7

  @functools.cached_property
  def sound(self) -> Sequence[Any]:
    """The tokens of the first batch of an engine without a fault."""
    return self.generate(Engine(), 0)[0].tokens

  def generate(self, engine: Engine, index: int) -> tuple[Samples, Warp]:
    """One batch, rows under the lab's laws in turn."""
    config, rows = self.config, len(self.prompts)
    tokens, lengths = right_padded(self.prompts)
    width = tokens.shape[1] + -tokens.shape[1] % PREFILL_CHUNK  # an engine pads to this
    temperature, top_p = np.resize(np.array(self.laws, np.float32), (rows, 2)).T
    fields: dict[str, Any] = {
      "temperature": temperature,
      "top_k": np.zeros(rows, np.int32),
      "top_p": top_p,
      "min_p": np.zeros(rows, np.float32),
    }
    warp = Warp(**fields)
    run = engine.trace(
      self.target,
      specjax.ModelDrafter(self.draft),
      tokens,
      key=jax.random.key(config.seed + 1 + index),
      prompt_lengths=lengths,
      max_new_tokens=self.limits,
      num_draft_tokens=self.num_draft_tokens,
      warp=warp,
      eos_id=self.eos_ids,
      max_length=slots(width, width + self.new_tokens, self.num_draft_tokens, PREFILL_CHUNK),
      prefill_chunk=PREFILL_CHUNK,
    )
    labelled = sum(int(info.num_emitted.sum()) for info in run.rounds) == int((run.result.lengths - lengths).sum())
    rounds = run.rounds if labelled else None  # a fault may tell of tokens that it cuts off
    return Samples.from_result(run.result, lengths, rounds=rounds, max_new_tokens=self.limits), warp

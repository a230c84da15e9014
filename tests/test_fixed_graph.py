"""Plain sampling through the passes of speculative sampling: the same bits, whatever was drafted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

import specjax
from specjax import fixed_graph, warp
from specjax.draft.base import Context, Proposal
from specjax.language_model import LanguageModel
from specjax.models import tabular
from specjax.models.config import DecoderConfig
from specjax.models.ops import Options
from specjax.models.transformer import Decoder, as_language_model

KEY, VOCAB, NEW = jax.random.key(5), 64, 24
LENGTHS = np.array([5, 2, 1, 4])


@functools.cache
def decoder(dtype: str, cpu_kernels: bool = True) -> LanguageModel:
  config = DecoderConfig(
    architecture="toy", vocab_size=VOCAB, context_length=256, num_layers=1, d_model=48, num_heads=3, num_kv_heads=1,
    head_dim=16, d_ff=80, tied_head=False,
  )  # fmt: skip
  options = Options(scan_layers=False, cpu_kernels=cpu_kernels)
  model = as_language_model(Decoder(config, options=options, dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0)))
  head = {"weight": 4 * model.params["head"]["weight"]}  # laws that are neither flat nor certain
  return dataclasses.replace(model, params=model.params | {"head": head})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Script:
  """Drafts what stands in tokens[B, L], right or wrong; up to `gamma` or, at some positions, fewer."""

  tokens: Array

  def init(self, batch, max_length):
    return ()

  def prefill(self, state, tokens, lengths, chunk):
    return state

  def propose(self, state, context: Context, gamma: int) -> Proposal:
    at = jnp.minimum(context.length[:, None] + jnp.arange(gamma)[None], self.tokens.shape[1] - 1)
    tokens = jnp.take_along_axis(self.tokens, at, axis=1)
    count = jnp.where(context.length % 5 == 0, gamma // 2, gamma)
    return Proposal(tokens, warp.one_hot_law(tokens, context.vocab_size), count, state)


def sampler(dtype: str, batch: int, gamma: int):
  model, random = decoder(dtype), np.random.default_rng(gamma)
  prompt = random.integers(0, VOCAB, (batch, 5), np.int32)

  def sample(drafter, temperature, **more):
    return specjax.sample(
      model, drafter, prompt, prompt_lengths=LENGTHS[:batch], key=KEY, max_new_tokens=NEW, verifier="coupled",
      num_draft_tokens=gamma, warp=specjax.Warp(temperature), **more,
    )  # fmt: skip

  return sample


def with_errors(result) -> Script:
  """Right but for two positions of every eleven: rounds of any gamma up to 7 are rejected at once, later, or never."""
  tokens = np.asarray(result.tokens)
  row, position = np.indices(tokens.shape)
  wrong = np.isin((position + row) % 11, (3, 5))
  return Script(jnp.asarray(np.where(wrong, (tokens + 1) % VOCAB, tokens)))


def same(a, b) -> None:
  assert np.array_equal(a.tokens, b.tokens)
  assert np.array_equal(np.asarray(a.logprobs).view(np.int32), np.asarray(b.logprobs).view(np.int32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gamma", range(1, 8))
def test_speculative_equals_plain_in_every_bit(gamma, dtype):
  """Greedy, and coupled at T = 1, over rounds that accept none, some and all; log-probabilities as well as tokens.

  Every gamma in both types; batches of 1 and 4 take turns, each pair being two programs of some seconds.
  """
  batch = 1 if (gamma % 2 == 0) == (dtype == "float32") else 4
  equal_in_every_bit(gamma, batch, dtype)


def equal_in_every_bit(gamma: int, batch: int, dtype: str) -> None:
  sample = sampler(dtype, batch, gamma)
  for temperature in (0.0, 1.0):
    plain = sample(None, temperature, fixed_graph=True)
    assert (np.asarray(plain.stats.rounds) == NEW).all()
    assert not np.asarray(plain.stats.drafted).any()
    speculative = sample(with_errors(plain), temperature)
    same(plain, speculative)
    stats = jax.tree.map(np.asarray, speculative.stats)
    assert (stats.rounds >= 3).all()
    assert (stats.tested.sum(-1) > stats.accepted).all()  # rejections in every row,
    assert (stats.tested[:, 0] > stats.accepted_at[:, 0]).any()  # of first drafts, too,
    assert (stats.accepted_at[:, -1] > 0).all()  # and rounds that accept all
    assert len(np.unique(plain.tokens)) > 4  # no text of one token, which any bits would give


def test_without_it_bits_differ():
  """Else the test above would tell nothing: plain sampling by one-row passes is another graph."""
  fixed = sampler("bfloat16", 4, 4)(None, 1.0, fixed_graph=True)
  assert not np.array_equal(fixed.logprobs, sampler("bfloat16", 4, 0)(None, 1.0).logprobs)


def row_dependent(error: float) -> LanguageModel:
  """A model whose rows beyond the first are off by `error`, as those of a product with a ragged last tile may be."""
  model = decoder("float32")

  def apply(params, tokens, cache, start):
    logits, cache = model.apply(params, tokens, cache, start)
    return logits.at[:, 1:, 7].add(error), cache

  return dataclasses.replace(model, apply=apply)


def test_a_backend_that_cannot_is_told():
  model = row_dependent(1e-6)
  with pytest.raises(RuntimeError, match=r"fixed_graph: on this backend .cpu. a position's logits depend on the row"):
    specjax.sample(model, None, np.ones((1, 3), int), key=KEY, num_draft_tokens=2, max_new_tokens=4, fixed_graph=True)


def test_a_cache_that_depends_on_the_row_is_told():
  model = decoder("float32")

  def apply(params, tokens, cache, start):
    logits, cache = model.apply(params, tokens, cache, start)
    # One slot of every pass: the one that its second row wrote.
    off = jax.vmap(lambda k, at: k.at[:, at + 1].multiply(1 + 1e-6))(cache["k"][0], start)
    return logits, {"k": [off], "v": cache["v"]}

  assert fixed_graph.row_error(dataclasses.replace(model, apply=apply), 2, 128, 3) > 0
  assert fixed_graph.row_error(model, 2, 128, 3) == 0


def test_a_dependence_far_into_the_cache_is_told():
  """Even in a batch of one, whose row can stand in one place at a time."""
  model = tabular.tabular(jax.random.key(1), 5)

  def apply(params, tokens, cache, start):
    logits, cache = model.apply(params, tokens, cache, start)
    late = (start[:, None] > 60) & (jnp.arange(tokens.shape[1])[None] > 0)
    return logits + jnp.where(late[..., None], jnp.arange(5.0), 0.0), cache

  for batch in (1, 2):
    assert fixed_graph.row_error(dataclasses.replace(model, apply=apply), batch, 128, 2) > 0
    assert fixed_graph.row_error(model, batch, 128, 2) == 0


def test_a_token_that_does_not_exist_is_no_difference_and_nan_is_no_verdict():
  """Tables share their functions, so a verdict on one holds for all: NaN says nothing of the others."""
  table = np.array([0, 1, 2, -np.inf], np.float32)
  call = functools.partial(
    specjax.sample, drafter=None, prompt_tokens=np.ones((1, 3), int), key=KEY, max_new_tokens=4, fixed_graph=True
  )
  broken = tabular.from_table(np.broadcast_to(np.where(table == 1, np.nan, table), (1, 5, 4)))
  with pytest.raises(ValueError, match="logits of random tokens are not finite numbers: some are NaN"):
    call(broken)
  assert np.asarray(call(tabular.from_table(np.broadcast_to(table, (1, 5, 4)))).tokens).max() < 3


def test_a_model_of_zeros_vouches_for_none():
  """Of the same functions and shapes: its rows are all the same, whatever a product does."""
  model = decoder("float32")

  def apply(params, tokens, cache, start):
    logits, cache = model.apply(params, tokens, cache, start)
    return logits.at[:, 1:].multiply(1 + 1e-5), cache

  faulty = dataclasses.replace(model, apply=apply)
  zeros = dataclasses.replace(faulty, params=jax.tree.map(jnp.zeros_like, model.params))
  call = functools.partial(
    specjax.sample, drafter=None, prompt_tokens=np.ones((1, 3), int), key=KEY, max_new_tokens=4, fixed_graph=True
  )
  call(zeros)
  with pytest.raises(RuntimeError, match="a position's logits depend on the row"):
    call(faulty)


def test_wrong_values_are_refused():
  call = functools.partial(specjax.sample, decoder("float32"), None, np.ones((1, 3), int), key=KEY)
  with pytest.raises(TypeError, match="fixed_graph=1 must be True or False"):
    call(fixed_graph=1)
  with pytest.raises(ValueError, match="num_draft_tokens"):
    call(fixed_graph=True, num_draft_tokens=-1)

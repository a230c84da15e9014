"""What tests/sharding asserts, on 8 CPU devices in a process of its own: XLA counts them once, when jax starts.

Writes one pickled dictionary to the path that it is given. XLA_FLAGS must be set by whoever starts it.
"""

import contextlib
import dataclasses
import functools
import pickle
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

import specjax
from specjax import sharding, warp
from specjax.models import tabular
from specjax.models.config import DecoderConfig
from specjax.models.ops import Options
from specjax.models.transformer import abstract_decoder
from specjax.placement import P
from specjax.verify import Verdict, declare

V, GAMMA, ROWS, NEW = 1536, 3, 8, 12  # blocks of 48 x 32; no other axis is as long as a quarter of the vocabulary
KEY = jax.random.key(3)


@functools.cache
def decoder(seed: int, layers: int) -> specjax.LanguageModel:
  """Random weights, and laws that are neither flat nor certain."""
  config = DecoderConfig(
    architecture="toy", vocab_size=V, context_length=256, num_layers=layers, d_model=32, num_heads=4, num_kv_heads=2,
    head_dim=8, d_ff=48, tied_head=False,
  )  # fmt: skip
  model = abstract_decoder(config, options=Options(scan_layers=True, cpu_kernels=False), dtype=jnp.float32)
  random = np.random.default_rng(seed)
  fill = lambda leaf: jnp.asarray(random.normal(size=leaf.shape), leaf.dtype) * leaf.shape[-1] ** -0.5  # noqa: E731
  params = jax.tree.map(fill, model.params)
  params["head"]["weight"] *= 4
  params["embed"]["weight"] *= 6
  return dataclasses.replace(model, params=params)


def settings() -> dict:
  """Ragged prompts and a warp of every kind; rows 0 and 4 are greedy."""
  random = np.random.default_rng(0)
  return {
    "prompt_tokens": random.integers(0, V, (ROWS, 7), np.int32),
    "prompt_lengths": np.array([7, 1, 3, 7, 2, 5, 6, 4]),
    "max_new_tokens": np.array([NEW, NEW, 5, NEW, NEW, 0, NEW, 9]),
    "warp": specjax.Warp(
      temperature=np.array([0, 1, 0.7, 1, 0, 1.2, 1, 0.5], np.float32),
      top_k=np.array([0, 20, 0, 0, 5, 0, 300, 0]),
      top_p=np.array([1, 1, 0.8, 1, 1, 0.95, 0.9, 1], np.float32),
      min_p=np.array([0, 0, 0, 0.05, 0, 0, 0.01, 0], np.float32),
    ),
    "num_draft_tokens": GAMMA,
  }


def on(data: int, model: int, explicit: bool = False) -> Mesh:
  return sharding.mesh(data=data, model=model, devices=jax.devices()[: data * model], explicit=explicit)


def placed(mesh: Mesh | None) -> tuple[specjax.LanguageModel, specjax.ModelDrafter]:
  target, drafter = decoder(0, 2), specjax.ModelDrafter(decoder(1, 1))
  return (target, drafter) if mesh is None else (sharding.shard(target, mesh), sharding.shard(drafter, mesh))


def generate(mesh: Mesh | None) -> tuple[dict, str]:
  """Whole generations under `coupled`, and their program."""
  call = settings()
  sample = jax.jit(lambda target, drafter, key: specjax.sample(target, drafter, key=key, verifier="coupled", **call))
  with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
    program = sample.lower(*placed(mesh), KEY).compile()
    return plain(program(*placed(mesh), KEY)), program.as_text()


def plain(result: specjax.SampleResult) -> dict:
  width = settings()["prompt_tokens"].shape[1] + NEW
  return {
    "tokens": np.asarray(result.tokens)[:, :width],
    "logprobs": np.asarray(result.logprobs)[:, :width],
    "rounds": np.asarray(result.stats.rounds),
    "accepted": np.asarray(result.stats.accepted),
  }


def round_by_round(mesh: Mesh) -> tuple[dict, dict]:
  """The same by `init` and `step`, and the types of the state before and after, and of what a round tells."""
  step = jax.jit(functools.partial(specjax.step, verifier="coupled"))
  types = lambda tree: jax.tree.map(lambda leaf: str(jax.typeof(leaf)), tree)  # noqa: E731
  with jax.set_mesh(mesh):
    target, drafter = placed(mesh)
    first = state = specjax.init(target, drafter, key=KEY, **settings())
    while not state.finished.all():
      state, info = step(state, target, drafter)
  return plain(state.result()), {"first": types(first), "last": types(state), "info": types(info)}


@declare(lossless=True)
def gathering(log_p, log_q, draft_tokens, num_drafted, key):
  """A planted fault: a rule that sorts a law, which takes all of it on one device."""
  token = jnp.argsort(log_p[0])[-1] + 0 * num_drafted
  return Verdict(jnp.int32(0) * num_drafted, token.astype(jnp.int32))


def programs(mesh: Mesh) -> dict[str, str]:
  """One round under each other rule, read but not run; and one with a gather planted in it."""
  target, drafter, found = sharding.shard(decoder(0, 1), mesh), specjax.NGramDrafter(), {}
  with jax.set_mesh(mesh):
    state = specjax.init(target, drafter, key=KEY, **settings())
    for name, rule in {**{name: name for name in ("token", "block", "match")}, "planted": gathering}.items():
      step = jax.jit(functools.partial(specjax.step, verifier=rule))
      found[name] = step.lower(state, target, drafter).compile().as_text()
  return found


def joint_law(mesh: Mesh) -> dict:
  """Two tokens behind one, by the token rule over a split vocabulary of 8."""
  target, draft = (tabular.tabular(jax.random.key(seed), 8, order=1) for seed in (0, 1))
  with jax.set_mesh(mesh):
    result = specjax.sample(
      sharding.shard(target, mesh, axes=P(None, None, "vocab")), sharding.shard(specjax.ModelDrafter(draft), mesh),
      np.full((40_000, 1), 5), key=jax.random.key(0), max_new_tokens=2, num_draft_tokens=1, prefill_chunk=1,
    )  # fmt: skip
  return {"pairs": np.asarray(result.tokens)[:, 1:], "law": tabular.law(target, (5,), 2)}


def bits(mesh: Mesh) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Draws from one law under one key, whole and split."""
  keys, laws, found = jax.random.split(KEY, ROWS), 3 * jax.random.normal(jax.random.key(1), (ROWS, V)), {}
  for draw in (warp.categorical, warp.gumbel_argmax):
    rows = jax.jit(jax.vmap(draw))
    whole = rows(keys, laws)
    split = rows(keys, jax.device_put(laws, NamedSharding(mesh, P("data", "model"))))
    found[draw.__name__] = np.asarray(whole), np.asarray(split)
  return found


def main(path: str) -> None:
  eight, explicit = on(2, 4), on(2, 4, True)
  found: dict = {"programs": programs(eight), "law": joint_law(eight), "bits": bits(eight)}
  meshes = {"1 device": None, "2x1 explicit": on(2, 1, True), "2x2": on(2, 2), "2x4": eight}
  runs = {name: generate(mesh) for name, mesh in meshes.items()}
  found["generations"] = {name: generation for name, (generation, _) in runs.items()}
  found["programs"]["sample"] = runs["2x4"][1]
  found["generations"]["2x4 explicit, round by round"], found["types"] = round_by_round(explicit)
  with open(path, "wb") as file:
    pickle.dump(found, file)


if __name__ == "__main__":
  main(sys.argv[1])

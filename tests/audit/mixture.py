"""Several engines in one program: row b is that of engine `b % len(engines)`. Compiling takes most of a test's time."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.audit.battery import InTurn
from specjax.audit.engine import Engine, Trace


def by_row(values: Sequence[Any]) -> Any:
  """A pytree of arrays [B, ...] whose row b is that of `values[b % len(values)]`."""

  def select(*leaves: Array) -> Array:
    first, *rest = leaves
    if all(leaf is first for leaf in rest):
      return first
    owner = (jnp.arange(first.shape[0]) % len(leaves)).reshape(-1, *[1] * (first.ndim - 1))
    for i, leaf in enumerate(rest, start=1):
      first = jnp.where(owner == i, leaf, first)
    return first

  return jax.tree.map(select, *values)


def distinct(values: Sequence[Any]) -> tuple[list[Any], list[int]]:
  """The different objects among the values, and which of them each value is."""
  kept = list({id(value): value for value in values}.values())
  return kept, [next(i for i, other in enumerate(kept) if other is value) for value in values]


def mixture(engines: Sequence[Engine]) -> Engine:
  """Of engines with one rule, that leave stop tokens and reports as they are."""
  parts: list[Any] = []  # each engine's target and which of the caches is its own, in the program being traced

  def models(target, drafter, asked):
    own = [engine.models(target, drafter, asked) for engine in engines]
    targets, owners = distinct([target for target, _, _ in own])
    drafters, draft_owners = distinct([drafter for _, drafter, _ in own])
    parts[:] = [(targets[i], i) for i in owners]

    def apply(params, tokens, cache, start):
      outs = [t.apply(p, tokens, c, start) for t, p, c in zip(targets, params, cache, strict=True)]
      return by_row([outs[i][0] for i in owners]), [cache for _, cache in outs]

    def init_cache(params, batch, max_length):
      return [t.init_cache(p, batch, max_length) for t, p in zip(targets, params, strict=True)]

    def rewind(caches, length):
      return [c if t.rewind is None else t.rewind(c, length) for t, c in zip(targets, caches, strict=True)]

    params = [t.params for t in targets]
    mixed = dataclasses.replace(target, params=params, apply=apply, init_cache=init_cache, rewind=rewind)
    return mixed, InTurn(drafters, np.asarray(draft_owners)), by_row([asked for _, _, asked in own])

  def apart(state, call: Callable[[Engine, Any, Any], Any], others: Sequence[Any] = ()):
    """Calls on every engine with its own target's cache; puts rows and caches together again."""
    owners = [owner for _, owner in parts]
    states = []
    for engine, (target, owner) in zip(engines, parts, strict=True):
      views = [dataclasses.replace(s, target_cache=s.target_cache[owner], draft_state=()) for s in (*others, state)]
      states.append(call(engine, target, views))
    caches = {owner: [] for owner in owners}
    for i, owner in enumerate(owners):
      caches[owner].append((i, states[i].target_cache))
    plain = by_row([dataclasses.replace(s, target_cache=(), stop_ids=jnp.zeros((0,), jnp.int32)) for s in states])
    merged = [_merge(caches[owner], len(engines)) for owner in sorted(caches)]
    return dataclasses.replace(plain, target_cache=merged, draft_state=state.draft_state, stop_ids=state.stop_ids)

  def begin(state, target):
    del target
    return apart(state, lambda engine, own, views: engine.begin(views[0], own))

  def after(before, state, info):
    return apart(state, lambda engine, own, views: engine.after(views[0], views[1], info), [before])

  return Engine(rule=engines[0].rule, models=models, begin=begin, after=after)


def _merge(caches: Sequence[tuple[int, Any]], count: int) -> Any:
  """Each engine's rows from its own cache; rows of others are nobody's."""
  own = dict(caches)
  return by_row([own.get(i, caches[0][1]) for i in range(count)])


def spread(request: dict[str, Any], rows: Sequence[str], count: int) -> dict[str, Any]:
  """The arguments of a sampler with every row repeated for each of `count` engines; rows: the names of its arrays."""
  repeat = lambda x: x[np.repeat(np.arange(len(x)), count)]  # noqa: E731
  return request | {name: repeat(request[name]) for name in rows} | {"warp": jax.tree.map(repeat, request["warp"])}


def share(trace: Trace, index: int, count: int) -> Trace:
  """The rows of one engine."""
  own = lambda x: x[index::count]  # noqa: E731
  return Trace(jax.tree.map(own, trace.result), [jax.tree.map(own, info) for info in trace.rounds])

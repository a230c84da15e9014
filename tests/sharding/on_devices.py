"""What tests/sharding asserts, on 8 CPU devices in a process of its own: XLA counts them once, when jax starts.

Writes one pickled dictionary into the folder that it is given. XLA_FLAGS must be set by whoever starts it.
"""

import contextlib
import dataclasses
import functools
import math
import pathlib
import pickle
import shutil
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

import specjax
from experiments import collectives
from specjax import sharding, warp
from specjax.language_model import empty_cache, run
from specjax.models import tabular
from specjax.models.config import DecoderConfig, parameter_shapes
from specjax.models.forms import as_checkpoint, from_checkpoint
from specjax.models.load import open_checkpoint
from specjax.models.ops import Options
from specjax.models.transformer import abstract_decoder
from specjax.placement import P
from specjax.verify import Verdict, declare
from tests import checkpoints, gguf_files

V, GAMMA, ROWS, NEW = 1536, 3, 8, 12  # blocks of 48 x 32; no other axis is as long as a quarter of the vocabulary
KEY, SAVED = jax.random.key(3), (0, 1, 2, 5, 10)  # rounds done when a state is saved


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
    return plain(program(*placed(mesh), KEY)), program.as_text() or ""


def plain(result: specjax.SampleResult) -> dict:
  width = settings()["prompt_tokens"].shape[1] + NEW
  return {
    "tokens": np.asarray(result.tokens)[:, :width],
    "logprobs": np.asarray(result.logprobs)[:, :width],
    "rounds": np.asarray(result.stats.rounds),
    "accepted": np.asarray(result.stats.accepted),
  }


def round_by_round(mesh: Mesh, folder: pathlib.Path) -> tuple[dict, dict]:
  """The same by `init` and `step`, and the types of the state before and after, and of what a round tells.

  The state before some rounds is saved.
  """
  step = jax.jit(functools.partial(specjax.step, verifier="coupled"))
  types = lambda tree: jax.tree.map(lambda leaf: str(jax.typeof(leaf)), tree)  # noqa: E731
  with jax.set_mesh(mesh):
    target, drafter = placed(mesh)
    first = specjax.init(target, drafter, key=KEY, **settings())
    specjax.save_state(first, folder / "0")
    state, info = step(first, target, drafter)
    while not state.finished.all():
      if (done := int(state.round.max())) in SAVED:
        specjax.save_state(state, folder / str(done))
      state, info = step(state, target, drafter)
  return plain(state.result()), {"first": types(first), "last": types(state), "info": types(info)}


def resumed(mesh: Mesh, folder: pathlib.Path) -> dict[str, dict]:
  """What becomes of every saved state on another mesh; and what is said of states of other models."""
  step, found = jax.jit(functools.partial(specjax.step, verifier="coupled")), {}
  target, drafter = placed(mesh)
  for saved in sorted(folder.iterdir()):
    state = specjax.load_state(saved, target, drafter)
    while not state.finished.all():
      state, _ = step(state, target, drafter)
    found[saved.name] = plain(state.result())
  return found


def loaded(folder: pathlib.Path) -> dict:
  """Checkpoints read onto meshes, into which parts, and what was read; and models saved and loaded in other forms."""
  found: dict = {"reads": {}, "differences": {}, "forms": {}}

  def differences(one: specjax.LanguageModel, other: specjax.LanguageModel) -> list[str]:
    a, b = as_checkpoint(one), as_checkpoint(other)
    return [name for name in parameter_shapes(a.config) if not np.array_equal(a.tensor(name), b.tensor(name))] + (
      [] if a.config == b.config else ["config"]
    )

  for name, kind, parts, scan in (("llama", "", 2, True), ("llama", ".gguf", 3, False), ("gpt2", "", 4, True)):
    checkpoints.write(name, folder / name)
    gguf_files.save(folder / f"{name}.gguf", gguf_files.metadata(name), gguf_files.tensors(name))
    whole = specjax.load_model(folder / f"{name}{kind}", dtype=jnp.float32)
    with warnings.catch_warnings():
      warnings.simplefilter("ignore")
      split = specjax.load_model(folder / f"{name}{kind}", dtype=jnp.float32, mesh=on(2, parts), scan_layers=scan)
      again = sharding.shard(whole, on(2, parts))
    label = f"{name}{kind} over {parts}"
    found["differences"][label] = differences(whole, split) + differences(whole, again)
    found["forms"][label] = str(split.params["embed"]["weight"].sharding.spec), split.apply.config
  # What one process reads, and how much of it at a time.
  checkpoint, sizes = open_checkpoint(folder / "llama"), []

  def tensor(name, index=None):
    part = checkpoint.tensor(name, index)
    sizes.append(part.size)
    return part

  config, options, placement = sharding.fit(checkpoint.config, Options(True, False), sharding.place(on(2, 2)))
  counted = dataclasses.replace(checkpoint, tensor=tensor)
  from_checkpoint(counted, dtype=jnp.float32, options=options, config=config, placement=placement)
  numbers = sum(math.prod(shape) for shape in parameter_shapes(checkpoint.config).values())
  found["reads"] = {"numbers": numbers, "read": sum(sizes), "largest": max(sizes)}

  model = specjax.load_model(folder / "llama", dtype=jnp.float32, mesh=on(2, 3), scan_layers=True)
  specjax.save_model(model, folder / "saved")
  for mesh, scan in ((on(2, 3), True), (on(2, 2, True), False), (None, False)):
    other = specjax.load_model(folder / "saved", dtype=jnp.float32, mesh=mesh, scan_layers=scan)
    found["differences"][f"saved on {mesh and mesh.shape}, {scan}"] = differences(model, other)
  return found


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


def exchanged(mesh: Mesh) -> list[dict]:
  """What a round exchanges, of two programs: the second has 4 times the vocabulary, and 3 drafts in place of 1."""
  shared = {"rule": "token", "split_draft": False, "rows": ROWS, "layers": 1, "d_model": 48}
  return [collectives.measure(mesh, vocab_size=v, gamma=g, **shared) for v, g in ((2048, 1), (8192, 3))]


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


def two_parameters() -> specjax.LanguageModel:
  """To be placed by given axes; it can't be run."""
  model = tabular.tabular(KEY, 8)
  return dataclasses.replace(model, params={"a": jnp.zeros((2, 8)), "b": [jnp.zeros(8), jnp.zeros(8)]})


def errors(folder: pathlib.Path) -> dict[str, str]:
  """What is refused, before anything is compiled."""
  eight, explicit = on(1, 8), on(2, 4, True)
  model, call, toy = decoder(0, 1), settings(), two_parameters()
  placed_model = sharding.shard(model, on(2, 4))

  def sample(target: specjax.LanguageModel, **changes) -> None:
    specjax.sample(target, None, key=KEY, **call | {"num_draft_tokens": 0} | changes)

  def set_and_sample(mesh: Mesh) -> None:
    with jax.set_mesh(mesh):
      sample(placed_model)

  calls = {
    "heads": lambda: sharding.shard(model, eight),
    "kv_heads": lambda: sharding.shard(model, on(2, 4), {"heads": "model", "kv_heads": "data"}),
    "size": lambda: sharding.mesh(model=3),
    "too many": lambda: sharding.mesh(model=16),
    "sizes": lambda: sharding.mesh(data=3, model=2),
    "number": lambda: sharding.mesh(model=0),
    "count": lambda: sharding.mesh(devices=4),
    "rows of devices": lambda: sharding.mesh(devices=eight.devices),
    "no devices": lambda: sharding.mesh(devices=[]),
    "a device twice": lambda: sharding.mesh(devices=jax.devices()[:2] * 2),
    "no mesh": lambda: sharding.shard(model, (2, 4)),
    "other axes": lambda: sharding.shard(model, jax.make_mesh((8,), ("x",), (AxisType.Auto,))),
    "logical": lambda: sharding.shard(model, on(2, 4), {"head": "model"}),
    "mesh axis": lambda: sharding.shard(model, on(2, 4), {"heads": "tensor"}),
    "twice": lambda: sharding.shard(model, on(2, 4), {"embed": "model", "mlp": "model"}),
    "a number": lambda: sharding.shard(model, on(2, 4), {"vocab": 3}),  # pyrefly: ignore[bad-assignment]
    "an axis twice": lambda: sharding.shard(model, on(2, 4), {"vocab": ("model", "model")}),
    "rows and vocab": lambda: sharding.shard(model, on(2, 4), {"batch": ("data", "model"), "vocab": "model"}),
    "rows and caches": lambda: sharding.shard(model, on(2, 4), {"batch": "model", "kv_heads": "model"}),
    "no rules": lambda: sharding.shard(model, on(2, 4), "model"),
    "a drafter's mesh": lambda: sharding.shard(specjax.NGramDrafter(), "nonsense"),
    "a drafter's rules": lambda: sharding.shard(specjax.NGramDrafter(), on(2, 4), {"heads": "tensor"}),
    "axes": lambda: sharding.shard(toy, on(2, 4), axes={"other": P()}),
    "axes of one": lambda: sharding.shard(toy, on(2, 4), axes={"a": P(), "b": [P()]}),
    "no axes": lambda: sharding.shard(toy, on(2, 4), axes={"a": P(), "b": [P(), "vocab"]}),
    "unknown axes": lambda: sharding.shard(toy, on(2, 4), axes={"a": P(None, "vocab"), "b": [P(), P("vocabulary")]}),
    "an unknown axis": lambda: sharding.shard(toy, on(2, 4), axes=P(("vocab", "embed"))),
    "a dictionary": lambda: sharding.shard(model.params, on(2, 4)),
    "rows": lambda: sample(placed_model, **{name: call[name][:7] for name in ("prompt_tokens", "prompt_lengths")}),
    "not set": lambda: sample(sharding.shard(model, explicit)),
    "another set": lambda: set_and_sample(on(4, 2)),
    "another order of axes": lambda: set_and_sample(Mesh(eight.devices.reshape(4, 2), ("model", "data"))),
    "another order of devices": lambda: set_and_sample(sharding.mesh(data=2, model=4, devices=jax.devices()[::-1])),
  }
  longer = specjax.ModelDrafter(decoder(1, 2))
  calls["draft nowhere"] = lambda: specjax.sample(placed_model, longer, key=KEY, **call)
  calls["draft elsewhere"] = lambda: specjax.sample(placed_model, sharding.shard(longer, on(4, 2)), key=KEY, **call)
  calls |= {
    "another draft": lambda: specjax.load_state(folder / "states" / "0", decoder(0, 2), longer),
    "no state": lambda: specjax.load_state(folder / "saved", decoder(0, 2), longer),
    "no model": lambda: specjax.load_model(folder / "states" / "0"),
    "exists": lambda: specjax.save_model(decoder(0, 1), folder / "saved"),
    "damaged": lambda: specjax.load_model(folder / "damaged"),
    "rules": lambda: specjax.load_model(folder / "llama", rules=sharding.RULES),
    "heads read": lambda: specjax.load_model(folder / "llama", mesh=on(1, 8)),
  }
  shutil.copytree(folder / "saved", folder / "damaged")
  max((folder / "damaged").rglob("ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size).unlink()
  found = {}
  for name, function in calls.items():
    try:
      function()
    except (TypeError, ValueError, FileNotFoundError) as error:
      found[name] = f"{type(error).__name__}: {error}"
  return found


def odd_sizes() -> dict:
  """Sizes that 4 devices don't divide: 6 heads, a width of 50, 97 tokens; and sizes that can be made to: 2 KV heads."""
  random, mesh, found = np.random.default_rng(0), on(2, 4), {}
  for name, heads, width in (("whole", 6, 50), ("repeated", 8, 48)):
    config = DecoderConfig(
      architecture="toy", vocab_size=97, context_length=64, num_layers=1, d_model=32, num_heads=heads, num_kv_heads=2,
      head_dim=8, d_ff=width, qkv_bias=True, qk_norm=True,
    )  # fmt: skip
    model = abstract_decoder(config, options=Options(scan_layers=False, cpu_kernels=True), dtype=jnp.float32)
    params = jax.tree.map(lambda leaf: jnp.asarray(random.normal(size=leaf.shape) / 5, leaf.dtype), model.params)
    model, tokens, start = dataclasses.replace(model, params=params), random.integers(0, 97, (2, 5), np.int32), [0, 0]
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      split = sharding.shard(model, mesh)
    abstract = sharding.shard(jax.eval_shape(lambda model: model, model), mesh) if name == "repeated" else split
    logits = [
      np.asarray(jax.jit(run)(each, tokens, empty_cache(each, 2, 16), np.array(start, np.int32))[0])
      for each in (model, split)
    ]
    layer = split.params["layers"][0]
    found[name] = {
      "logits": logits,
      "warnings": [str(warning.message) for warning in caught],
      "specs": {key: str(layer[key]["weight"].sharding.spec) for key in ("q", "k", "o", "up", "down")},
      "embed": (split.params["embed"]["weight"].shape, str(split.params["embed"]["weight"].sharding.spec)),
      "kv_heads": split.apply.config.num_kv_heads,
      "abstract": jax.tree.map(lambda a, b: (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding),
                               abstract.params, split.params),
    }  # fmt: skip
  return found


def main(folder: pathlib.Path) -> None:
  eight = on(2, 4)
  found: dict = {
    "programs": programs(eight),
    "exchanged": exchanged(eight),
    "law": joint_law(eight),
    "bits": bits(eight),
  }
  meshes = {"1 device": None, "2x1 explicit": on(2, 1, True), "2x2": on(2, 2), "2x4": eight}
  runs = {name: generate(mesh) for name, mesh in meshes.items()}
  found["programs"]["sample"] = runs["2x4"][1]
  found["generations"] = {name: generation for name, (generation, _) in runs.items()}
  found["generations"]["2x4 explicit, round by round"], found["types"] = round_by_round(
    on(2, 4, True), folder / "states"
  )
  found["resumed"] = resumed(on(4, 2), folder / "states")
  by_axes = sharding.shard(two_parameters(), eight, axes={"a": P(None, "vocab"), "b": (P(), P("heads"))})
  found["axes"] = jax.tree.map(lambda leaf: str(leaf.sharding.spec), by_axes.params)
  found |= {"loaded": loaded(folder), "odd": odd_sizes(), "errors": errors(folder)}
  with open(folder / "found.pkl", "wb") as file:
    pickle.dump(found, file)


if __name__ == "__main__":
  main(pathlib.Path(sys.argv[1]))

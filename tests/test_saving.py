"""States and models on disk: damage, models of other sizes, and what an interrupted save leaves.

Meshes are in tests/sharding.
"""

import dataclasses
import functools
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

import specjax
from specjax.models.config import DecoderConfig, widened
from specjax.models.forms import reform
from specjax.models.ops import Options
from specjax.models.orbax import checksums
from specjax.models.transformer import abstract_decoder

CONFIG = DecoderConfig(
  architecture="toy", vocab_size=97, context_length=64, num_layers=1, d_model=16, num_heads=4, num_kv_heads=2,
  head_dim=4, d_ff=32, tied_head=False,
)  # fmt: skip
PROMPTS = np.array([[3, 1, 4], [1, 5, 90]], np.int32)


def decoder(seed: int = 0, **changes) -> specjax.LanguageModel:
  config = dataclasses.replace(CONFIG, **changes)
  model = abstract_decoder(config, options=Options(scan_layers=False, cpu_kernels=False), dtype=np.float32)
  random = np.random.default_rng(seed)
  fill = lambda leaf: jnp.asarray(random.normal(size=leaf.shape), jnp.float32)  # noqa: E731
  return dataclasses.replace(model, params=jax.tree.map(fill, model.params))


def started(target: specjax.LanguageModel, **changes) -> specjax.SpecState:
  call = {"max_new_tokens": 8, "num_draft_tokens": 2, "max_length": 64, "prefill_chunk": 4} | changes
  return specjax.init(target, specjax.NGramDrafter(), PROMPTS, key=jax.random.key(0), **call)


def finish(state: specjax.SpecState, target: specjax.LanguageModel) -> np.ndarray:
  step = jax.jit(specjax.step)
  while not state.finished.all():
    state, _ = step(state, target, specjax.NGramDrafter())
  return np.asarray(state.tokens)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """A state and a model. Tests copy what they damage."""
  folder = tmp_path_factory.mktemp("saved")
  specjax.save_state(started(decoder()), folder / "state")
  specjax.save_model(decoder(), folder / "model")
  return folder


def test_a_state_goes_on(saved: pathlib.Path) -> None:
  target = decoder()
  expected = finish(started(target), target)
  restored = specjax.load_state(saved / "state", target, specjax.NGramDrafter())
  np.testing.assert_array_equal(finish(restored, target), expected)


def test_checksums_tell_every_change_of_a_number() -> None:
  """One bit of one number, two numbers that change places, and types of 1, 8, 16 and 32 bits; keys too."""
  random = np.random.default_rng(0)
  tree = {
    "float32": jnp.asarray(random.normal(size=(3, 5)), jnp.float32),
    "bfloat16": jnp.asarray(random.normal(size=(7,)), jnp.bfloat16),
    "int8": jnp.asarray(random.integers(-100, 100, (2, 2, 2)), jnp.int8),
    "bool": jnp.array([True, False, True]),
    "key": jax.random.split(jax.random.key(1), 2),
    "scalar": jnp.int32(5),
  }
  before = checksums(tree)
  assert before == checksums(tree)
  assert len(before) == 6
  values = np.asarray(tree["float32"])
  for at in np.ndindex(values.shape):
    for bit in range(32):
      words = values.copy().view(np.uint32)
      words[at] ^= np.uint32(1 << bit)
      if bit in (0, 13, 31):
        assert checksums({"x": jnp.asarray(words.view(np.float32))}) != checksums({"x": tree["float32"]})
  changed = {
    "float32": tree["float32"][::-1],
    "bfloat16": tree["bfloat16"][::-1],
    "int8": tree["int8"].at[1, 0, 1].add(1),
    "bool": ~tree["bool"],
    "key": tree["key"][::-1],
    "scalar": jnp.int32(6),
  }
  assert not set(checksums(changed).values()) & set(before.values())


def test_a_flipped_bit_is_found(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
  """Anywhere in the data files: either orbax can't read them, or the checksums differ, or nothing has changed."""
  copy, said, random = tmp_path / "model", list[str](), np.random.default_rng(0)
  shutil.copytree(saved / "model", copy)
  whole = checksums(specjax.load_model(copy).params)
  files = [path for path in copy.rglob("*") if path.is_file() and path.parent.name == "d"]
  assert files
  for path in files:
    original = path.read_bytes()
    for at in random.integers(0, len(original), 16):
      path.write_bytes(original[:at] + bytes([original[at] ^ 16]) + original[at + 1 :])
      try:
        assert checksums(specjax.load_model(copy).params) == whole  # a byte that holds nothing
      except ValueError as error:
        said.append(str(error))
    path.write_bytes(original)
  assert len(said) >= 5
  assert all(words.startswith(f"{copy} ") for words in said), said


@pytest.mark.parametrize("name", ["tokens", "key", "target_cache.k.0"])
def test_numbers_of_a_state_that_are_not_those_saved(saved: pathlib.Path, tmp_path: pathlib.Path, name: str) -> None:
  def change(about: dict) -> None:
    about["specjax_state"]["checksums"][f"['{name}']"][1] ^= 1

  shutil.copytree(saved / "state", tmp_path / "state")
  _edit_about(tmp_path / "state", change)
  with pytest.raises(ValueError, match=rf"state is damaged: of \['{name}'\] other numbers were saved than are read"):
    specjax.load_state(tmp_path / "state", decoder(), specjax.NGramDrafter())


def test_what_a_damaged_checkpoint_is_called(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
  target = decoder()
  load, said = functools.partial(specjax.load_state, target=target, drafter=specjax.NGramDrafter()), {}
  for name in sorted({path.name for path in (saved / "state").rglob("*") if path.is_file()}):
    for damage in ("gone", "empty"):
      copy = tmp_path / f"{name}-{damage}"
      shutil.copytree(saved / "state", copy)
      for path in copy.rglob(name):
        path.unlink() if damage == "gone" else path.write_bytes(b"")
      try:
        load(copy)  # some files are not needed
      except (ValueError, FileNotFoundError) as error:
        said[copy] = str(error)
  assert len(said) > 5
  assert all(words.startswith(f"{copy} ") for copy, words in said.items()), said


def _edit_about(checkpoint: pathlib.Path, edit) -> None:
  path = checkpoint / "_CHECKPOINT_METADATA"
  about = json.loads(path.read_text())
  edit(about["custom_metadata"])
  path.write_text(json.dumps(about))


def test_what_is_said_of_other_versions(saved: pathlib.Path, tmp_path: pathlib.Path) -> None:
  for name in ("state", "model"):
    shutil.copytree(saved / name, tmp_path / name)
  _edit_about(tmp_path / "model", lambda about: about["specjax_decoder"]["config"].update(windows=3))
  with pytest.raises(ValueError, match=r"model holds a configuration that this version of specjax can't read.*windows"):
    specjax.load_model(tmp_path / "model")
  _edit_about(tmp_path / "state", lambda about: about["specjax_state"].pop("stops"))
  with pytest.raises(ValueError, match=r"state is damaged, or of another version of .*save_state: .* stops"):
    specjax.load_state(tmp_path / "state", decoder(), specjax.NGramDrafter())


def test_states_of_other_models(tmp_path: pathlib.Path, saved: pathlib.Path) -> None:
  """More heads of keys and values, which are no repetition; and tokens that the target hasn't."""
  specjax.save_state(started(decoder(num_kv_heads=4)), tmp_path / "four")
  with pytest.raises(ValueError, match=r"four is of another target or drafter: target_cache.* has more than 2 heads"):
    specjax.load_state(tmp_path / "four", decoder(), specjax.NGramDrafter())
  with pytest.raises(ValueError, match="state is of another target: it holds the token 90, this one has 90 tokens"):
    specjax.load_state(saved / "state", decoder(vocab_size=90), specjax.NGramDrafter())
  with pytest.raises(TypeError, match=r"state must be a specjax.SpecState, .* got dict"):
    specjax.save_state({"a": 1}, tmp_path / "dict")  # type: ignore[arg-type]


@pytest.mark.parametrize("repeats", [(1, 2), (2, 1)])
def test_heads_that_are_repeated_go_on(tmp_path: pathlib.Path, repeats: tuple[int, int]) -> None:
  """From a model with each head once to one with each twice, and back: the same tokens."""
  before, after = (reform(decoder(), widened(CONFIG, times), decoder().apply.options) for times in repeats)
  specjax.save_state(started(before), tmp_path / "state")
  restored = specjax.load_state(tmp_path / "state", after, specjax.NGramDrafter())
  np.testing.assert_array_equal(finish(restored, after), finish(started(decoder()), decoder()))


def test_overwriting_keeps_the_old_until_the_new_is_there(tmp_path: pathlib.Path, monkeypatch) -> None:
  target, path = decoder(), tmp_path / "state"
  load = functools.partial(specjax.load_state, target=target, drafter=specjax.NGramDrafter())
  step = jax.jit(specjax.step)
  first = started(target)
  second = step(first, target, specjax.NGramDrafter())[0]
  specjax.save_state(first, path)
  with pytest.raises(ValueError, match="state exists already: pass overwrite=True"):
    specjax.save_state(second, path)

  def killed():
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:  # interrupted while it is written
    patch.setattr(ocp, "save", lambda *_, **__: killed())
    with pytest.raises(KeyboardInterrupt):
      specjax.save_state(second, path, overwrite=True)
  assert checksums(load(path)) == checksums(first)
  with monkeypatch.context() as patch:  # and between the two renames, the worst of moments
    rename = pathlib.Path.rename
    patch.setattr(pathlib.Path, "rename", lambda own, to: rename(own, to) if own == path else killed())
    with pytest.raises(KeyboardInterrupt):
      specjax.save_state(second, path, overwrite=True)
  assert checksums(load(tmp_path / "state.old")) == checksums(first)
  assert checksums(load(tmp_path / "state.new")) == checksums(second)
  specjax.save_state(first, path, overwrite=True)
  specjax.save_state(second, path, overwrite=True)
  assert checksums(load(path)) == checksums(second)
  assert [each.name for each in tmp_path.iterdir()] == ["state"]


def test_nothing_else_is_overwritten(tmp_path: pathlib.Path) -> None:
  """A folder of other things, which somebody may need."""
  (tmp_path / "thesis").mkdir()
  (tmp_path / "thesis" / "chapter").write_text("...")
  with pytest.raises(ValueError, match="thesis exists and is no orbax checkpoint, so it is not overwritten"):
    specjax.save_model(decoder(), tmp_path / "thesis", overwrite=True)
  assert (tmp_path / "thesis" / "chapter").exists()


def test_padding_of_a_vocabulary_is_no_token() -> None:
  """Ids that a mesh adds stand for nothing: not in prompts, not as stops; and a draft without them fits."""
  padded = reform(decoder(), widened(CONFIG, 1, 384), decoder().apply.options)
  assert (padded.num_ids, padded.vocab_size) == (97, 384)
  sample = functools.partial(specjax.sample, padded, None, key=jax.random.key(0), num_draft_tokens=0, max_new_tokens=8)
  with pytest.raises(ValueError, match=r"prompt_tokens\[0, 1\]=97 is out of range: allowed 0 to 96"):
    sample([[3, 97]])
  with pytest.raises(ValueError, match=r"eos_id.*=100 is out of range: allowed 0 to 96"):
    sample([[3]], eos_id=100)
  drafted = specjax.sample(
    padded, specjax.ModelDrafter(decoder(1)), PROMPTS, key=jax.random.key(0), max_new_tokens=8, verifier="coupled"
  )
  plain = sample(PROMPTS, verifier="coupled")
  np.testing.assert_array_equal(drafted.tokens[:, :11], plain.tokens[:, :11])

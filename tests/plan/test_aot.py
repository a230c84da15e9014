"""Programs for TPUs that are not there: what is refused without libtpu, and what a compiled one says with it."""

import dataclasses
import importlib.util
import math

import jax
import pytest

import specjax
from specjax import sharding
from specjax.models.config import DecoderConfig
from specjax.models.ops import Options
from specjax.models.transformer import abstract_decoder
from specjax.plan import aot
from specjax.plan.hlo import Module
from tests.plan.test_hlo import TEXT

CONFIG = DecoderConfig(
  architecture="tiny", vocab_size=1024, context_length=512, num_layers=3, d_model=256, num_heads=8, num_kv_heads=8,
  head_dim=128, d_ff=1088,
)  # fmt: skip


def test_a_topology_that_is_not_known_lists_those_that_are() -> None:
  with pytest.raises(ValueError, match=r"topology='v5e:3x3' is not known. Known are v4:1x1x1, .*, v6e:8x8\."):
    aot.devices("v5e:3x3")
  assert len(aot.TOPOLOGIES) == 24
  for name in aot.TOPOLOGIES:
    assert 1 <= math.prod(map(int, name.partition(":")[2].split("x"))) <= 64


def test_without_libtpu_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  with pytest.raises(ImportError, match=r"needs libtpu, .*: pip install -e '\.\[tpu\]'"):
    aot.devices("v5e:2x2")


@pytest.mark.parametrize(
  ("message", "sizes"),
  [
    ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (256.00G) exceeds "
     "available HBM (15.75G).", (256, 15.75)),
    ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 512.50M of 15.25G hbm. Exceeded hbm capacity by",
     (0.5004882812, 15.25)),
    ("INTERNAL: something else", None),
  ],
)  # fmt: skip
def test_refusals_of_the_compiler(message: str, sizes: tuple[float, float] | None) -> None:
  found = aot.parse_refusal(message)
  assert found is None if sizes is None else found == pytest.approx([size * 2**30 for size in sizes])
  if found:
    more = (found[0] - found[1]) / 2**30
    assert f"{more:.2f} more than the {found[1] / 2**30:.2f} GiB" in str(aot.DoesNotFit(*found))


def test_costs_and_floors() -> None:
  module = Module(TEXT)
  layer = [item for item in module.items if item.loops]
  once, all_turns = aot.cost(layer, 1), aot.cost(layer, 0)
  assert once.collectives == {"all-reduce": (1, 2560)}
  assert all_turns.collectives == {"all-reduce": (80, 80 * 2560)}
  assert once.sent == 2 * 15 * 2560 // 16
  assert (all_turns.hbm, all_turns.flops, all_turns.count) == (80 * once.hbm, 80 * once.flops, 80)
  chip = aot.Chip(2, 1.0, 1e9, 1e12, 1e6, ())
  slow_memory = once.hbm / 0.5e9 + once.sent / 0.5e6
  assert once.floor(chip) == pytest.approx(slow_memory)
  busy = dataclasses.replace(once, flops=10**12, sent=0, hbm=0)
  assert busy.floor(chip) == pytest.approx(2.0)


def test_a_model_on_no_mesh() -> None:
  with pytest.raises(ValueError, match=r"lies on no mesh: place it with specjax\.sharding\.shard"):
    aot.compile_sample(
      abstract_decoder(CONFIG), None, prompt_tokens=8, max_new_tokens=8, num_draft_tokens=0, max_length=32
    )


@pytest.mark.skipif(
  importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install -e '.[tpu]'"
)
def test_a_program_for_four_chips() -> None:
  mesh = sharding.mesh(model=4, devices=aot.devices("v5e:2x2"))
  model = abstract_decoder(CONFIG, options=Options.for_backend("tpu"))
  target, drafter = sharding.shard(model, mesh), sharding.shard(specjax.ModelDrafter(model), mesh)
  sizes = {"prompt_tokens": 16, "max_new_tokens": 64, "max_length": 256}
  program = aot.compile_sample(target, drafter, num_draft_tokens=2, **sizes)
  count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.params))
  assert program.memory.params == pytest.approx(2 * count * (1 + 1 / 4), rel=0.01)  # the draft whole, the target split
  assert program.memory.caches == 3 * 2 * 2 * (8 + 8 // 4) * 256 * 128  # layers, keys and values, bfloat16, heads
  assert program.memory.total < aot.chip("v5e:2x2").hbm
  assert not program.gathers(CONFIG.vocab_size)
  assert not program.large(2**18)  # not of weights 272 wide either, a part of which fills no tiles
  weights = 2 * (count - 1024 * 256) / 4
  assert program.target.hbm == pytest.approx(weights, rel=0.3)
  assert program.target.collectives["all-reduce"][0] >= 2 * 3
  assert program.draft.count == 0  # it waits for no other device
  assert program.round.hbm >= program.target.hbm + program.draft.hbm
  large = dataclasses.replace(CONFIG, num_layers=64, d_model=8192, d_ff=65536)
  too_large = sharding.shard(abstract_decoder(large, options=Options.for_backend("tpu")), mesh)
  with pytest.raises(aot.DoesNotFit, match="GiB of HBM on each device"):
    aot.compile_sample(too_large, None, num_draft_tokens=0, **sizes)

"""The pairs of configs/aot.py are the models they are named after, on meshes that make up their topologies."""

import math

import pytest

from configs.aot import PAIRS, get_config
from specjax.models.config import DecoderConfig, parameter_shapes
from specjax.plan import aot

# Billions of parameters. Chinchilla's relative positions, 8192 x 8192 a layer, make up the rest of its 70.
SIZES = {"chinchilla": (64.7, 3.8), "llama": (70.6, 8.0), "qwen": (32.8, 0.6)}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_is_what_its_name_says(pair: str) -> None:
  config = get_config(pair)
  for name, billions in zip(("target", "draft"), SIZES[pair], strict=True):
    shapes = parameter_shapes(DecoderConfig(**config[name].to_dict())).values()
    assert sum(map(math.prod, shapes)) / 1e9 == pytest.approx(billions, abs=0.06)
  chips = math.prod(map(int, config.topology.partition(":")[2].split("x")))
  assert math.prod(config.mesh.values()) == chips * aot.chip(config.topology).devices
  for name in ("target", "draft"):
    split = config[f"{name}_rules"]["heads"]
    parts = math.prod(config.mesh[axis] for axis in ([split] if isinstance(split, str) else split))
    assert config[name]["num_heads"] % parts == 0


def test_a_pair_that_is_not_known() -> None:
  with pytest.raises(ValueError, match="pair 'gemini' is not known: one of chinchilla, llama, qwen"):
    get_config("gemini")

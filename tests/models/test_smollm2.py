"""The real SmolLM2-135M-Instruct against log-probabilities that transformers 5.24 computes from the same weights.

tests/golden/smollm2_logprobs.json holds, for three texts, the mean negative log-likelihood of tokens 1.. given those
before, and the eight most likely next tokens; transformers ran the same GGUF file, dequantised to float32.
"""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.language_model import LanguageModel

CASES = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "smollm2_logprobs.json").read_text())

# Either implementation's float32 logits lie up to 5e-5 from the float64 ones after thirty layers; the file's float32
# sums over 49,152 probabilities add 2e-5, its rounding 5e-6.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> LanguageModel:
  return specjax.load_model("smollm2-135m")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["text"][:20])
def test_log_probabilities(model: LanguageModel, case: dict[str, Any]) -> None:
  ids = np.asarray(case["ids"])
  width = max(len(other["ids"]) for other in CASES)  # one compile for all; what lies behind a text changes nothing
  tokens = jnp.asarray(np.pad(ids, (0, width - len(ids))), jnp.int32)[None]
  cache = model.init_cache(model.params, 1, width)
  logits, _ = jax.jit(model.apply)(model.params, tokens, cache, jnp.zeros(1, jnp.int32))
  log_probs = np.asarray(jax.nn.log_softmax(logits[0, : len(ids)]))

  nll = -log_probs[np.arange(len(ids) - 1), ids[1:]].mean()
  assert nll == pytest.approx(case["nll_per_token"], abs=TOLERANCE)
  np.testing.assert_allclose(log_probs[-1, case["last_top8_ids"]], case["last_top8_logprobs"], rtol=0, atol=TOLERANCE)
  assert np.argsort(-log_probs[-1])[:8].tolist() == case["last_top8_ids"]

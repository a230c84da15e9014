"""The same float32 weights in `transformers`: plain generation, and assisted generation with prompt lookup.

Needs the optional extra `peers` (torch, transformers). Timed in turns with our own generations of the same lengths.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import specjax
from experiments import report
from specjax.language_model import LanguageModel
from specjax.models.load import open_checkpoint, resolve

TOKENS = 64
TEXT = "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n\n\ndef multiply(a, b):\n"


def run(target: LanguageModel, config) -> dict[str, Any]:
  """Timings of TOKENS greedy tokens behind TEXT, ours and theirs; TEXT repeats itself, so lookups find something."""
  tokenizer = specjax.load_tokenizer(config.model)
  prompt = np.array([tokenizer.encode(TEXT)], np.int32)
  functions: dict[str, Callable[[], Any]] = dict(_theirs(config.model, prompt, config.num_draft_tokens))
  for name, gamma in (("specjax plain", 0), ("specjax n-gram", config.num_draft_tokens)):
    functions[name] = functools.partial(
      specjax.sample, target, specjax.NGramDrafter(), prompt, key=jax.random.key(0), max_new_tokens=TOKENS,
      num_draft_tokens=gamma, max_length=config.max_length, warp=specjax.Warp(temperature=0.0),
    )  # fmt: skip
  texts = {
    name: np.asarray(getattr(out := f(), "tokens", out))[0, : prompt.shape[1] + TOKENS] for name, f in functions.items()
  }
  same = {name: bool(np.array_equal(text, texts["specjax plain"])) for name, text in texts.items()}
  return {"timings": report.median_interleaved(functions, config.repeats), "same_text": same, "tokens": TOKENS}


def _theirs(name: str, prompt: np.ndarray, gamma: int) -> dict[str, Callable[[], Any]]:
  try:
    import torch
    import transformers
  except ImportError as error:
    raise ImportError("config.peers needs torch and transformers: pip install -e '.[peers]'.") from error
  checkpoint = open_checkpoint(resolve(name))
  c = checkpoint.config
  if (c.architecture, c.rope_scaling, c.tied_head) != ("llama", None, True):
    raise ValueError(f"config.peers knows tied llama models without rope scaling, got {c.architecture} ({name}).")
  hf_config = transformers.LlamaConfig(
    vocab_size=c.vocab_size, hidden_size=c.d_model, intermediate_size=c.d_ff, num_hidden_layers=c.num_layers,
    num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim,
    max_position_embeddings=c.context_length, rms_norm_eps=c.norm_eps, tie_word_embeddings=True,
    rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta}, bos_token_id=None, eos_token_id=None,
  )  # fmt: skip
  model = transformers.LlamaForCausalLM(hf_config).eval()
  with torch.no_grad():
    for theirs, parameter in model.named_parameters():
      parameter.copy_(torch.from_numpy(checkpoint.tensor(_our_name(theirs))))
  inputs = torch.from_numpy(prompt.astype(np.int64))
  settings = {
    "attention_mask": torch.ones_like(inputs),
    "min_new_tokens": TOKENS,
    "max_new_tokens": TOKENS,
    "do_sample": False,
    "pad_token_id": 0,
  }
  generate = functools.partial(torch.inference_mode()(model.generate), inputs, **settings)
  return {
    "transformers generate": generate,
    "transformers prompt lookup": functools.partial(generate, prompt_lookup_num_tokens=gamma),
  }


def _our_name(theirs: str) -> str:
  layer_names = {
    "self_attn.q_proj": "q", "self_attn.k_proj": "k", "self_attn.v_proj": "v", "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate", "mlp.up_proj": "up", "mlp.down_proj": "down",
  }  # fmt: skip
  norms = {"input_layernorm.weight": "attn_norm.scale", "post_attention_layernorm.weight": "mlp_norm.scale"}
  name = theirs.removeprefix("model.").replace("embed_tokens", "embed")
  for old, new in {**layer_names, **norms}.items():
    name = name.replace(old, new)
  return "norm.scale" if name == "norm.weight" else name

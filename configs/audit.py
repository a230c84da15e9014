"""Defaults of experiments/audit.py.

Each can be set on the command line: --config.samples=engine.jsonl --config.temperature=0.7 --config.top_p=0.95.
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "samples": "",  # a JSONL file, a generation a line; see docs/audit.md. Empty: a demonstration on our own sampler
      "model": "smollm2-135m",  # whose law is claimed: a name, a path or a repository id, what specjax.load_model takes
      "draft": "",  # the engine's draft model, if it had one; likewise
      "rule": "",  # "token": judge acceptance too, as token verification with that draft model and labels
      "temperature": 1.0,  # the sampling law that was asked for; 0 is argmax
      "top_k": 0,
      "top_p": 1.0,
      "min_p": 0.0,
      # Ids that end a generation: None, the tokenizer's; (), none, for a run that ignored them.
      "eos": config_dict.placeholder(tuple),
      "noise": "bfloat16",  # what the engine's numerics may do: "float32" or "bfloat16"
      "alpha": 1e-3,  # probability of calling a fault where there is none
      "power": 0.8,  # of finding the excess stated as detectable
      "seed": 0,
      "demo_prompts": 8,  # of the demonstration
      "demo_tokens": 64,
    }
  )

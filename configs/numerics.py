"""The same tokens through different computation graphs: what changes, and does it matter?

  python -m experiments.numerics --config=configs/numerics.py

Feeds prompts through many graphs on a real model and on a toy. Minutes on 2 CPU cores; it resumes.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "model": "smollm2-135m",
      "matrix": {
        "contexts": 2,  # HumanEval and Wikipedia, taking turns
        "tokens": 33,  # of each context
        "toy_contexts": 3,
        "toy_tokens": 97,
        "top_p": 0.9,
        "devices": 8,  # of the process in which a CPU plays several
      },
      "text": {
        # In this order, prompts of HumanEval and Wikipedia in turns. A CPU converts 16-bit weights at every use.
        "prompts": {"float32": 112, "bfloat16": 32, "float16": 32},
        "batch": 16,  # prompts; each has two rows, greedy and at T = 1
        "prompt_tokens": 32,  # the last ones of each prompt
        "new_tokens": 32,
        "gamma": 3,
        "held_out": 24,  # Wikipedia texts whose perplexity is measured in every dtype
        "held_out_tokens": 64,  # the first ones of each
      },
      "seed": 0,
    }
  )

"""The same tokens through different computation graphs: what changes, and does it matter?

  python -m experiments.numerics --config=configs/numerics.py

Feeds prompts through many graphs on a real model and on a toy; samples prompts plainly and speculatively in three
dtypes, and explains where the texts differ. On 2 CPU cores: about 15 minutes; it resumes.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "model": "smollm2-135m",
      # "fixed" takes five minutes more. Run one alone with --config.parts='("text",)'
      "parts": ("matrix", "text"),
      "matrix": {
        "contexts": 2,  # HumanEval and Wikipedia, taking turns
        "tokens": 17,  # of each context
        "toy_contexts": 3,
        "toy_tokens": 97,
        "top_p": 0.9,
        "devices": 8,  # of the process in which a CPU plays several
      },
      "text": {
        # Of HumanEval and Wikipedia in turns: how many greedily, and at T = 1. A CPU takes 3 times as long in 16 bits.
        "prompts": {"float32": (104, 24), "bfloat16": (32, 32), "float16": (16, 16)},
        "rows": 32,  # a batch
        "prompt_tokens": 32,  # the last ones of each prompt
        "new_tokens": 32,
        "gamma": 3,
        "held_out": 24,  # Wikipedia texts whose perplexity is measured in every dtype
        "held_out_tokens": 64,  # the first ones of each
      },
      "fixed": {
        "dtypes": ("float32", "bfloat16"),
        "gammas": (4,),
        "rows": 4,  # half of them greedy, half at T = 1
        "new_tokens": 32,
        "max_length": 512,
        "repeats": 5,
      },
      "seed": 0,
    }
  )

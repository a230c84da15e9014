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
      "seed": 0,
    }
  )

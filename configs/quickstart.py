"""Defaults of experiments/quickstart.py.

Each can be set on the command line: --config.gamma=4 --config.sources="('mixed',)" --config.temperatures="(0.7,)".
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "model": "smollm2-135m",  # a name, a path or a repository id: what specjax.load_model takes
      "drafter": "ngram",  # or "model:" and the name or path of a smaller model with the same tokenizer
      "parts": 1,  # devices that the target's parameters are split over; in several processes 1 each, or all of them
      "sources": ("humaneval", "wikipedia"),  # also "mixed"
      "prompts_per_source": 10,
      "max_prompt_tokens": 256,  # of a longer prompt the last ones are kept
      "max_new_tokens": 64,
      "gamma": 3,  # drafts a round; few lookups in such prompts go further
      "temperatures": (0.0, 1.0),
      "seed": 0,
    }
  )

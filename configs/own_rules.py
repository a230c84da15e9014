"""Defaults of experiments/own_rules.py: about an hour and a half on 2 CPU cores; it resumes.

python -m experiments.own_rules --config=configs/own_rules.py --config.tokens=10000
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "model": "smollm2-135m",
      "rules": (),  # default: all that are lossless
      "tokens": 100_000,  # at least, for each rule
      "rows": 64,  # of a batch, a prompt each
      "max_prompt_tokens": 32,  # longer prompts keep their end
      "new_tokens": 96,
      "gamma": 2,
      "alpha": 1e-3,  # probability of calling a fault where there is none, for each rule
      "seed": 0,
    }
  )

"""Defaults of experiments/own_rules.py: about an hour and a half on 2 CPU cores; it resumes.

python -m experiments.own_rules --config=configs/own_rules.py --config.tokens=10000
python -m experiments.own_rules --config=configs/own_rules.py:toy  # 200,000 tokens a rule
"""

import ml_collections


def get_config(model: str = "smollm2-135m") -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict(
    {
      "model": model,
      "rules": (),  # default: all that are lossless
      "tokens": 100_000,  # at least, for each rule
      "rows": 64,  # of a batch, a prompt each
      "max_prompt_tokens": 32,  # longer prompts keep their end
      "new_tokens": 96,
      "gamma": 2,
      "mesh": (),  # (data, model), of all devices, those of other processes too; default: one device
      "alpha": 1e-3,  # probability of calling a fault where there is none, for each rule
      "seed": 0,
    }
  )
  if model == "toy":
    config.update({"tokens": 200_000, "rows": 256})
  return config

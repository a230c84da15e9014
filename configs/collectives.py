"""Programs of experiments/collectives.py, each a change of the usual one: 32,768 tokens, 3 drafts, the token rule.

python -m experiments.collectives --config=configs/collectives.py  # three minutes on 2 CPU cores
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "data": 2,  # devices that share the rows
      "model": 4,  # devices that share the parameters
      "rows": 8,
      "layers": 2,  # of the target; the draft has one
      "d_model": 64,
      "vocab_size": 32_768,
      "gamma": 3,
      "vocab_sizes": (8_192, 131_072),  # in place of vocab_size
      "gammas": (1, 7),  # in place of gamma
      "rules": ("block", "coupled", "match"),  # in place of the token rule
      "split_draft": True,  # also with a draft model that is split like the target
    }
  )

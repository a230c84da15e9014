"""Every planted fault against every check: which one catches it?

  python -m experiments.mutants --config=configs/mutants.py
  python -m experiments.mutants --config=configs/mutants.py --config.model=smollm2-135m

The checks on tiny languages take about an hour on 2 CPU cores; a run that was interrupted goes on where it was. Faults
that samples can show are planted in the sampler of a toy, too, and the audit says how many tokens it needed; with a
model also in that one's, for a minute more for most faults, and a quarter of an hour for the faintest.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.mutants = ()  # names; default: all
  config.model = ""  # what specjax.load_model takes; default: no real model
  config.tokens = 24576  # of the model, at most; then the audit gives up on a fault
  config.toy_tokens = 2**18  # the same of a toy
  config.rows = 16  # of a batch
  config.toy_rows = 128
  config.new_tokens = 32  # a row; three times as many where a fault needs longer texts
  config.num_draft_tokens = 3
  config.alpha = 1e-3  # of the audit
  config.seed = 0
  return config

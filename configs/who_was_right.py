"""One person saw speculative decoding write worse text, another said that is impossible. Who was right?

  python -m experiments.who_was_right --config=configs/who_was_right.py

Samples a real model five ways on the same prompts, and lets the audit say which of them sampled its law: some minutes
on 2 CPU cores; it resumes. Fewer tokens (--config.batches=1) may be too few to tell.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict(
    {
      "model": "smollm2-135m",
      "prompts": 16,  # HumanEval and Wikipedia, taking turns; a batch has a row for each
      "max_prompt_tokens": 96,  # longer prompts keep their end
      "max_new_tokens": 64,
      "batches": 2,  # each with a key of its own
      "gamma": 3,  # drafts a round, by n-gram lookup
      "leniency": 0.1,  # the lossy rule accepts with probability min(1, p / (this q))
      "alpha": 1e-3,  # probability of calling a fault where there is none
      "seed": 0,
    }
  )

"""What a token, a pass and a round cost, beside what the machine's memory allows.

  python -m experiments.speed --config=configs/speed.py
  python -m experiments.speed --config=configs/speed.py --config.peers=True     # pip install -e ".[peers]"

On 2 CPU cores: about 6 minutes, 9 with peers. Run it on a quiet machine; figures are medians of interleaved repeats.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
  config = ml_collections.ConfigDict()
  config.model = "smollm2-135m"
  config.num_draft_tokens = 7  # a verify pass of 8 tokens
  config.repeats = 9  # of every timing, taken in turns
  config.context = 200  # tokens in the cache where passes are timed
  config.cache_slots = (1024, 2048, 4096, 8192)
  config.max_length = 512  # slots of the generations that are timed
  config.peers = False  # time transformers on the same weights, too
  return config

"""Makes the golden logits in this folder: what transformers computes from the checkpoints of tests/checkpoints.py.

Run from the repository's root, in an environment of its own (the tests themselves need no torch):

  python3 -m venv /tmp/golden && /tmp/golden/bin/pip install torch==2.13.0 transformers==5.24.0 ml_dtypes
  PYTHONPATH=. /tmp/golden/bin/python tests/golden/make_golden.py

Each <name>.npz holds `tokens` int32[2, 40], `logits` float32[2, 40, V], and the version of transformers. The model
runs in float32 with eager attention, in one pass over the whole rows. The script fails if transformers finds a tensor
missing, unexpected or of another shape, if variants that share weights give different logits, or if the logits are
of a size or a sameness that would let a fault pass.
"""

import pathlib
import tempfile

import numpy as np
import torch  # pyrefly: ignore [missing-import]
import transformers  # pyrefly: ignore [missing-import]

from tests import checkpoints

FOLDER = pathlib.Path(__file__).parent


def load(name: str) -> transformers.PreTrainedModel:
  """The checkpoint `name` as a transformers model, every tensor accounted for."""
  with tempfile.TemporaryDirectory() as directory:
    checkpoints.write(name, directory)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
      directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
  faults = {kind: names for kind, names in info.items() if names}
  if faults:
    raise ValueError(f"{name}: transformers did not load the checkpoint as written: {faults}")
  return model.eval()


def compute(model: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
  """float32[B, T, V] logits of int32[B, T] tokens."""
  with torch.inference_mode():
    return model(input_ids=torch.from_numpy(tokens).long()).logits.numpy()


def main() -> None:
  torch.set_num_threads(1)
  golden: dict[str, np.ndarray] = {}
  for name, variant in checkpoints.VARIANTS.items():
    tokens = checkpoints.tokens(name)
    logits = compute(load(name), tokens)
    if logits.dtype != np.float32 or logits.shape != (*tokens.shape, checkpoints.VOCAB_SIZE):
      raise ValueError(f"{name}: logits are {logits.dtype}{list(logits.shape)}.")
    size, change = logits.std(), np.abs(np.diff(logits, axis=1)).mean()
    if not (1.0 < size < 5.0 and change > 0.5):
      raise ValueError(f"{name}: logits of deviation {size:.2f}, changing by {change:.2f} between positions.")
    shared = golden.setdefault(variant.golden, logits)
    print(f"{name}: deviation {size:.2f}, largest {np.abs(logits).max():.2f}, change {change:.2f}")
    if not np.array_equal(shared, logits):
      raise ValueError(f"{name} differs from {variant.golden} by {np.abs(shared - logits).max()}; they share weights.")
    np.savez_compressed(
      FOLDER / f"{variant.golden}.npz", tokens=tokens, logits=logits, transformers_version=transformers.__version__
    )


if __name__ == "__main__":
  main()

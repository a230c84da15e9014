"""Two engines without a target: equal laws, different ones, and prompts that differ."""

import numpy as np
import pytest
import scipy.stats

from specjax.audit import Samples, two_sample


def engine(seed: int, tilt: float = 0.0, count: int = 20, prompts: int = 6) -> Samples:
  """Every prompt has a law of its own over tokens; `tilt` moves mass to token 0."""
  random = np.random.default_rng(seed)
  laws = np.random.default_rng(99).dirichlet(np.ones(12), size=prompts)
  laws[:, 0] += tilt
  laws /= laws.sum(-1, keepdims=True)
  return Samples(
    prompts=[[p] for p in range(prompts) for _ in range(count)],
    tokens=[random.choice(12, size=random.integers(5, 20), p=laws[p]) for p in range(prompts) for _ in range(count)],
  )


def test_equal_laws_give_uniform_p_values():
  p = [two_sample(engine(2 * i), engine(2 * i + 1), permutations=100, alpha=0.05).p_value for i in range(60)]
  assert scipy.stats.kstest(p, "uniform").pvalue > 1e-3
  assert min(p) > 0


def test_other_laws_are_seen():
  found = two_sample(engine(0), engine(1, tilt=0.5))
  assert found.ok is False
  assert found.statistic > found.threshold
  assert str(found).startswith("DIFFERENT LAWS")
  assert two_sample(engine(0), engine(1)).ok is True


def test_prompts_are_never_mixed():
  """Engines with other shares of the same prompts, each right: only what happens within a prompt counts."""
  a, b = engine(0, count=40), engine(1, count=40)
  keep_a = [i for i in range(240) if not (i // 40 == 0 and i % 40 > 10)]
  keep_b = [i for i in range(240) if not (i // 40 == 5 and i % 40 > 10)]
  a, b = (Samples([s.prompts[i] for i in k], [s.tokens[i] for i in k]) for s, k in ((a, keep_a), (b, keep_b)))
  assert two_sample(a, b).ok is True


def test_little_says_little():
  found = two_sample(engine(0, count=3), engine(1, count=3))
  assert found.ok is None
  assert "CAN'T SAY" in str(found)


BAD = {
  "alpha of 0": ({"alpha": 0}, "alpha=0 must be above 0 and below 1"),
  "alpha of 1": ({"alpha": 1.0}, "alpha=1.0 must be above 0"),
  "negative alpha": ({"alpha": -0.1}, "alpha=-0.1 must be above 0"),
  "alpha of nan": ({"alpha": float("nan")}, "alpha=nan must be above 0"),
  "alpha as text": ({"alpha": "0.1"}, "alpha='0.1' must be a number"),
  "length": ({"length": 0}, "length=0 must be 1 or more"),
  "negative length": ({"length": -3}, "length=-3 must be 1 or more"),
  "half a length": ({"length": 2.5}, "length=2.5 must be a whole number of 1 or more"),
  "permutations": ({"permutations": 2000.5}, "permutations=2000.5 must be a whole number"),
  "seed": ({"seed": -1}, "seed=-1 must be 0 or more"),
  "a": ({"a": [[1], [1]]}, "a must be specjax.audit.Samples, got list; see Samples.read"),
  "b": ({"b": None}, "b must be specjax.audit.Samples, got NoneType"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values(name):
  settings, message = BAD[name]
  with pytest.raises((TypeError, ValueError), match=message):
    two_sample(**{"a": engine(0), "b": engine(1), **settings})


def test_no_shared_prompts():
  with pytest.raises(ValueError, match="no prompt has two generations"):
    two_sample(Samples([[1], [1]], [[1], [1]]), Samples([[2], [2]], [[1], [1]]))
  with pytest.raises(ValueError, match="permutations=10"):
    two_sample(engine(0), engine(1), permutations=10)

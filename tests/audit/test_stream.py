"""An audit of text that comes in parts says what one of the whole says, and scores no token twice."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest

import specjax
from specjax.audit import Samples, Stream, audit, core
from tests.audit import engines
from tests.audit.engines import ROWS, draft, part, samples, target

SETTINGS = {"draft": draft(), "noise": "float32", "rule": "token"}
# Rows ask for laws of their own, and a part has an empty generation.
TEMPERATURES = np.resize(np.float32([1.0, 1.0, 0.8]), ROWS)
CUTS = (0, 20, 21, 100, ROWS)


def warp(of: slice) -> specjax.Warp:
  return specjax.Warp(temperature=TEMPERATURES[of])


def made() -> Samples:
  whole = samples()
  empty = {name: [[], *getattr(whole, name)[1:]] for name in ("tokens", "labels", "logprobs")}
  return dataclasses.replace(whole, **empty)


def parts() -> list[slice]:
  return [slice(*ends) for ends in itertools.pairwise(CUTS)]


def test_in_parts_as_in_one(monkeypatch):
  scored = []
  score = core.score
  monkeypatch.setattr(core, "score", lambda *a, **k: scored.append(score(*a, **k)) or scored[-1])
  stream, report = Stream(target(), **SETTINGS), None
  for own in parts():
    stream, report = stream.add(part(made(), own), warp=warp(own))
  assert [len(each.log_p) for each in scored] == [made().counts[own].sum() for own in parts()]
  whole = audit(target(), made(), warp=warp(slice(None)), **SETTINGS)
  jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-4), stream.scores, scored[-1])
  assert report is not None
  assert {t.name for t in whole.tests} == {t.name for t in report.tests}
  for ours, theirs in zip((*report.tests, *report.rule_tests), (*whole.tests, *whole.rule_tests), strict=True):
    assert ours.z == pytest.approx(theirs.z, abs=1e-2)
  np.testing.assert_allclose(report.evidence.path, whole.evidence.path, atol=1e-2)
  assert (report.generations, report.empty, report.tokens) == (whole.generations, whole.empty, whole.tokens)


def test_it_stops_at_a_fault():
  wrong, stream, report = samples(engines.residual_from_p), Stream(target(), draft=draft(), noise="float32"), None
  for at in range(0, ROWS, 8):
    stream, report = stream.add(part(wrong, slice(at, at + 8)))
    if report.evidence.crossed:
      break
  assert report is not None
  assert report.evidence.crossed
  assert report.tokens < 5000 < wrong.num_tokens


def test_a_law_that_is_nan_is_found_where_it_is():
  whole = samples()
  broken = dataclasses.replace(target(), params=target().params.at[..., 0].set(np.nan))
  stream, _ = Stream(target()).add(part(whole, slice(0, 3)))
  with pytest.raises(ValueError, match="the target's law is NaN at token 0 of generation 3"):
    dataclasses.replace(stream, target=broken).add(part(whole, slice(3, 5)))


def test_parts_tell_the_same_things():
  whole = samples()
  stream, _ = Stream(target()).add(part(whole, slice(0, 20)))
  plain = Samples(whole.prompts[20:40], whole.tokens[20:40])
  with pytest.raises(ValueError, match="these samples have no rows, and those before had rows"):
    stream.add(plain)
  stream, _ = Stream(target()).add(plain)
  with pytest.raises(ValueError, match="these samples have rows, and those before had no rows"):
    stream.add(part(whole, slice(0, 20)))


def test_wrong_settings_are_refused_before_there_are_samples():
  with pytest.raises(ValueError, match=r"alpha=2\.0 must be a probability"):
    Stream(target(), alpha=2.0)

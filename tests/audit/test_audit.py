"""The audit against engines that are known to be right, or wrong in a known way."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.audit import Samples, audit, core, drift
from specjax.audit.samples import LABELS
from specjax.models import tabular
from tests.audit import engines
from tests.audit.engines import NEW, V, draft, part, samples, target


def run(made, **settings):
  return audit(target(), made, **{"draft": draft(), "noise": "float32", **settings})


def test_a_right_engine_shows_no_sign():
  report = run(samples(), rule="token")
  assert report.ok is True
  assert report.verdict.startswith("NO SIGN OF A FAULT in 20,480 tokens")
  assert not report.findings
  assert report.evidence.crossed is None
  assert {t.name for t in report.tests} == {
    "surprise", "draft", "argmax", "repeat", "copy", "echo", "serial", "across", "rank",
  }  # fmt: skip
  assert {t.name for t in report.rule_tests} == {"acceptance", "accepted", "residual"}
  assert all(t.adjusted > 1e-3 for t in (*report.tests, *report.rule_tests))


@pytest.mark.parametrize("rule", engines.WRONG)
def test_a_wrong_rule_is_found(rule):
  report = run(samples(rule))
  assert report.ok is False
  assert report.verdict.startswith("FAULT")


@pytest.mark.parametrize(("rule", "score", "least"), [
  (engines.residual_from_p, "draft", 15.0),
  (engines.lenient, "draft", 8.0),
  (engines.u_scaled, "draft", 3.0),
])  # fmt: skip
def test_leaning_towards_the_drafter(rule, score, least):
  report = run(samples(rule))
  assert report.test(score).z > least
  assert report.test(score).tv > 0
  assert "towards the drafter" in report.verdict


def test_a_clear_fault_stops_a_stream_early():
  report = run(samples(engines.residual_from_p))
  assert report.evidence.crossed is not None
  assert report.evidence.crossed < 4000


def test_only_bonus_tokens():
  report = run(samples(engines.bonus_from_q), rule="token")
  assert report.contrast.groups == ("bonus",)
  assert "Where: only bonus tokens" in report.verdict
  assert all(t.adjusted > 1e-3 for t in report.rule_tests)


def test_acceptance_and_residual_are_told_apart():
  wrong_residual = {t.name: t for t in run(samples(engines.residual_from_p), rule="token").rule_tests}
  assert abs(wrong_residual["acceptance"].z) < 4
  assert abs(wrong_residual["accepted"].z) < 4
  assert wrong_residual["residual"].z > 30
  too_lenient = {t.name: t for t in run(samples(engines.lenient), rule="token").rule_tests}
  assert too_lenient["acceptance"].z > 5


def mixed(is_wrong) -> Samples:
  """Generations of a wrong engine where `is_wrong`, of the right one elsewhere; four rows a batch."""
  ok, wrong = samples(), samples(engines.residual_from_p)
  chosen = [wrong if is_wrong(i) else ok for i in range(engines.ROWS)]
  return Samples(
    prompts=[s.prompts[i] for i, s in enumerate(chosen)],
    tokens=[s.tokens[i] for i, s in enumerate(chosen)],
    rows=[i % 4 for i in range(engines.ROWS)],
  )


def test_only_rows_beyond_the_first():
  report = run(mixed(lambda i: i % 4 > 0))
  assert report.contrast.grouping == "row"
  assert report.contrast.groups == ("1", "2", "3")
  assert "only rows 1 to 3" in report.verdict
  assert "batching fault" in report.verdict


def test_worse_in_some_rows_is_not_only_in_some_rows():
  mild, bad = samples(engines.lenient), samples(engines.residual_from_p)
  chosen = [bad if i % 4 else mild for i in range(engines.ROWS)]
  made = Samples([s.prompts[0] for s in chosen], [s.tokens[i] for i, s in enumerate(chosen)], rows=mixed(bool).rows)
  report = run(made)
  assert report.ok is False
  assert report.contrast is None or report.contrast.grouping != "row"


def test_only_late_in_the_file():
  report = run(mixed(lambda i: i >= engines.ROWS // 2))
  assert report.contrast.groups == ("3rd quarter", "4th quarter")
  assert "in the course of these samples" in report.verdict


def test_only_from_some_position_on():
  """The first 16 tokens of right generations; what follows is drawn as if the text began there: a lost context."""
  ok = samples()
  shuffled = [np.concatenate([ok.tokens[i][:16], ok.tokens[i - 1][16:]]) for i in range(engines.ROWS)]
  report = run(Samples(ok.prompts, shuffled), draft=None)
  # Only the tokens right behind the seam have another context; the language looks two tokens back.
  assert report.ok is False
  assert report.contrast.grouping in ("position", "context")


def test_copies_are_found():
  """Every generation is right, but each is made twice: nothing that looks at them one by one can see it."""
  half = part(samples(), slice(0, 256))
  report = run(Samples.concatenate([half, half]))
  assert report.ok is False
  assert {t.name for t in report.tests if t.adjusted < 1e-6} == {"copy", "echo", "across"}
  assert "random bits are shared" in report.verdict


def test_temperature():
  cold = run(samples(), warp=specjax.Warp(temperature=1.25))
  assert cold.test("surprise").z < -5
  assert "too cold" in cold.verdict


@pytest.mark.parametrize("warp", [specjax.Warp(top_p=0.7), specjax.Warp(top_k=4), specjax.Warp(min_p=0.2)])
def test_a_token_outside_the_support_is_proof(warp):
  few = part(samples(), slice(0, 3))
  report = run(few, warp=warp)
  assert report.ok is False
  assert report.support.beyond > 0
  assert "have probability 0" in report.verdict
  generation, position, token = report.support.worst
  assert few.tokens[generation][position] == token


def ties(gap: float):
  """A language without memory whose two best tokens are `gap` logits apart."""
  return tabular.from_table(jnp.zeros((1, 4)).at[0, 0].set(5.0).at[0, 1].set(5.0 - gap))


def test_greedy():
  made = Samples([[0]] * 20, [[0] * 30] * 20)
  greedy = specjax.Warp(temperature=0.0)
  assert audit(ties(0.5), made, warp=greedy, noise="float32").ok is True
  slip = Samples([[0]] * 20, [[0] * 29 + [1]] + [[0] * 30] * 19)
  report = audit(ties(0.5), slip, warp=greedy, noise="float32")
  assert report.ok is False
  assert report.support.worst == (0, 29, 1)
  assert report.support.largest_margin == pytest.approx(0.5)
  assert "are not the argmax" in report.verdict
  assert audit(ties(0.5), slip, warp=greedy, noise="bfloat16").ok is True  # half a logit is within its noise
  many = Samples([[0]] * 20, [[0, 1] * 15] * 20)
  assert audit(ties(0.5), many, warp=greedy, noise="bfloat16").ok is False  # but not on every second token


def test_an_engine_s_own_logprobs():
  made = samples()
  assert run(made).logprobs.off_warped == 0
  zeros = dataclasses.replace(made, logprobs=[np.zeros(NEW)] * engines.ROWS)
  report = run(zeros)
  assert report.ok is False
  assert "all the same number" in report.verdict
  half = dataclasses.replace(made, logprobs=[values / 2 for values in made.logprobs])
  assert "are not those of these tokens" in run(half).verdict
  # Those without the warp are a matter of taste.
  hot = run(made, warp=specjax.Warp(temperature=1.3))
  assert "are those without the warp" in hot.verdict


def test_an_engine_s_own_draft_logprobs():
  made = samples()
  text = jnp.array([[*prompt, *tokens] for prompt, tokens in zip(made.prompts, made.tokens, strict=True)])
  laws = np.asarray(tabular.laws(draft(), text, specjax.Warp()))[:, len(engines.PROMPT) - 1 : -1]
  right = np.take_along_axis(laws, np.stack(made.tokens)[..., None], axis=-1)[..., 0]
  right[:, ::3] = np.nan  # no draft there
  stated = dataclasses.replace(made, draft_logprobs=list(right))
  assert run(stated).draft_logprobs_off == 0
  assert run(stated, draft=None).draft_logprobs_off is None
  assert run(made).draft_logprobs_off is None
  colder = run(dataclasses.replace(made, draft_logprobs=list(0.9 * right)))
  assert colder.ok is True  # the text is right
  assert "draft log-probabilities are not those" in colder.verdict


def toy(*p: float) -> specjax.LanguageModel:
  """The same law at every position."""
  return tabular.from_table(jnp.log(jnp.array([p])))


@pytest.mark.parametrize("rare", [1e-4, 2e-4, 2e-3])
def test_two_tokens_that_decide_are_no_sign(rare):
  """On both sides, so that there is no skew: rare tokens that the draft has more of, and less of."""
  p, q = (1 - 2 * rare, rare, rare), (1 - 30 * rare - rare / 30, 30 * rare, rare / 30)
  faults = 0
  for seed in range(60):
    tokens = np.random.default_rng(seed).choice(3, p=p, size=(10, 50))
    faults += audit(toy(*p), Samples([[0]] * 10, tokens), draft=toy(*q), noise="float32").ok is False
  assert faults == 0


@pytest.mark.parametrize("size", [50, 300, 1000])
def test_a_law_of_equals_has_a_constant_surprise(size):
  """Its float32 sum is off by a bit everywhere, and varies by less."""
  tokens = np.random.default_rng(0).integers(0, size, (50, 40))
  report = audit(toy(*np.full(size, 1 / size)), Samples([[0]] * 50, tokens), noise="float32")
  assert report.ok is True
  assert "surprise" in report.skipped


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-3}])
def test_ties_of_a_low_precision_engine_are_no_fault(settings):
  """Argmaxes of rounded logits, whatever it is called that leaves one token; alone, and beside sampled rows."""
  table = target().params
  rounded = np.asarray(table + 0.05 * jax.random.normal(jax.random.key(3), table.shape))
  prompts, greedy = np.random.default_rng(0).integers(1, V, (128, 3)), []
  for prompt in prompts:
    tokens = prompt.tolist()
    for _ in range(NEW):
      tokens.append(int(rounded[(len(tokens) - 1) % len(rounded), tokens[-2], tokens[-1]].argmax()))
    greedy.append(tokens[3:])
  alone = audit(target(), Samples(prompts, greedy), warp=specjax.Warp(**settings))
  assert alone.ok is True
  assert alone.greedy
  assert 0.01 < alone.support.outside / alone.tokens < 0.05
  drawn = part(samples(), slice(0, 128))
  both = Samples([*prompts, *drawn.prompts], [*greedy, *drawn.tokens])
  warp = dataclasses.replace(specjax.Warp().per_row(256))
  values = {name: np.where(np.arange(256) < 128, value, getattr(warp, name)) for name, value in settings.items()}
  mixed = audit(target(), both, warp=dataclasses.replace(warp, **values))
  assert mixed.ok is True
  assert not mixed.greedy


def test_logprobs_of_the_temperature_alone_and_unknown_ones():
  """What an engine tells before it truncates is no fault; nor is a null here and there."""
  drawn = samples()
  warp = specjax.Warp(top_k=4)
  table = np.asarray(jax.nn.log_softmax(target().params, -1))
  told = []
  for prompt, tokens in zip(drawn.prompts, drawn.tokens, strict=True):
    text = [*prompt.tolist(), *tokens.tolist()]
    told.append([float(table[(t - 1) % len(table), text[t - 2], text[t - 1], text[t]]) for t in range(3, len(text))])
  gaps = [[None if i % 10 == 0 else value for i, value in enumerate(row)] for row in told]
  found = run(dataclasses.replace(drawn, logprobs=gaps), warp=warp).logprobs
  assert found.off_scaled == found.off_raw == 0.0
  assert found.off_warped > 0.5
  assert run(dataclasses.replace(drawn, logprobs=gaps)).ok is True


def test_one_bad_row_of_many():
  """The last of 32, which no bin may dilute."""
  drawn, bad = samples(), samples(engines.residual_from_p)
  rows = np.arange(512) % 32
  report = run(
    dataclasses.replace(
      drawn,
      rows=rows,
      tokens=[(bad if row == 31 else drawn).tokens[i] for i, row in enumerate(rows)],
      labels=None,
      logprobs=None,
    )
  )
  assert report.ok is False
  assert "only row 31" in report.verdict


def test_no_contrast_without_a_sign():
  for seed in range(20):
    report = run(part(samples(), slice(seed, None, 20)))
    assert report.ok is True
    assert report.contrast is None


def test_too_few_tokens():
  report = run(part(samples(), slice(0, 2)))
  assert report.ok is None
  assert report.verdict.startswith("CAN'T SAY: 80 tokens")
  assert not report.findings


@pytest.mark.parametrize(
  ("rule", "settings"),
  [(engines.residual_from_p, {}), (engines.right, {"warp": specjax.Warp(top_k=4)}), (engines.right, {"eos_id": 3})],
)
def test_ids_made_from_text_prove_nothing(rule, settings):
  """Not by statistics; nor by ids outside a support, behind a stop token, or beyond a limit."""
  made = dataclasses.replace(samples(rule), from_text=True, max_new_tokens=np.full(512, NEW - 1))
  report = run(made, **settings)
  assert report.ok is None
  assert "Give token ids" in report.verdict


def test_text_behind_a_stop_token():
  report = run(samples(), eos_id=(5, 3))
  assert report.behind_stop > 0
  assert "behind a stop token" in report.verdict
  assert {t.name for t in report.tests} >= {"stop"}


def test_empty_generations_are_counted():
  made = Samples.concatenate([part(samples(), slice(0, 7)), Samples([[1]], [[]])])
  report = run(made)
  assert (report.generations, report.empty, report.tokens) == (8, 1, 7 * NEW)
  assert "1 of 8 generations are empty" in report.verdict


def test_tolerance_of_drift():
  """A fault as small as the tolerance is none, however many tokens there are."""
  exact = run(samples(engines.u_scaled))
  tolerant = run(samples(engines.u_scaled), noise=core.Noise(drift=0.1, logits=1.0, mass=0.1, outside=1.0, flips=1.0))
  assert exact.ok is False
  assert tolerant.ok is True
  assert tolerant.test("draft").z == exact.test("draft").z
  assert tolerant.test("draft").detectable > exact.test("draft").detectable
  assert tolerant.test("draft").detectable_exactly == exact.test("draft").detectable


def test_drift_is_exact():
  """Against what it predicts of samples of the other law."""
  made = samples()
  assert all(abs(d) < 1e-6 for d in drift(target(), target(), made).values())
  engine = tabular.from_table(0.8 * target().params)
  found = drift(target(), engine, made)
  seen = run(engines.generate(engine, engines.right, 5)).test("surprise")
  assert found["surprise"] > 0.05
  assert seen.excess / seen.scale == pytest.approx(found["surprise"], rel=0.2)


def test_report_as_json_text_and_figure(tmp_path):
  report = run(samples(engines.bonus_from_q), rule="token")
  plain = json.loads(report.to_json())
  assert plain["ok"] is False
  assert plain["tests"][0]["name"] == "surprise"
  assert "| surprise |" in str(report)
  report.plot(tmp_path / "report.png")
  assert (tmp_path / "report.png").stat().st_size > 10_000
  assert [path.name for path in tmp_path.iterdir()] == ["report.png"]
  few = run(part(samples(), slice(0, 2)))
  few.plot(tmp_path / "few.SVG")


@pytest.mark.parametrize("name", ["a", "a.txt", ".png", "folder.png/a"])
def test_a_figure_of_no_format(name, tmp_path):
  report = run(part(samples(), slice(0, 2)))
  with pytest.raises(ValueError, match=r"must have one of these suffixes: .*\.pdf, .*\.png"):
    report.plot(tmp_path / name)
  assert not list(tmp_path.iterdir())


BAD = {
  "vocabulary": (lambda: Samples([[1]], [[V]]), {}, r"tokens\[0\]\[0\]=16 is outside the target's vocabulary"),
  "prompt": (lambda: Samples([[1, -2]], [[1]]), {}, r"prompts\[0\]\[1\]=-2 is outside"),
  "empty": (lambda: Samples([[1]], [[]]), {}, "none of the 1 generations holds a token"),
  "noise": (samples, {"noise": "float8"}, "noise='float8' is unknown"),
  "alpha": (samples, {"alpha": 0.0}, "alpha=0.0"),
  "alpha as text": (samples, {"alpha": "0.1"}, "alpha='0.1' must be a number"),
  "power": (samples, {"power": None}, "power=None must be a number"),
  "power of nan": (samples, {"power": float("nan")}, "power=nan must be a probability"),
  "no noise": (samples, {"noise": None}, "noise=None is neither a name nor a Noise. Known: float32, bfloat16; or"),
  "a dict": (samples, {"noise": {}}, "noise={} is neither a name nor a Noise"),
  "a number": (samples, {"noise": 0.1}, "noise=0.1 is neither a name nor a Noise"),
  "seed": (samples, {"seed": -1}, "seed=-1 must be 0 or more"),
  "half a seed": (samples, {"seed": 0.5}, "seed=0.5 must be a whole number"),
  "no seed": (samples, {"seed": None}, "seed=None must be a whole number"),
  "a draft of 3": (samples, {"draft": 3}, "draft must be a specjax.LanguageModel, got int"),
  "n-grams": (
    samples,
    {"draft": specjax.NGramDrafter()},
    "draft must be .* got NGramDrafter: what drafts without a model",
  ),
  "drafter": (
    samples,
    {"draft": specjax.ModelDrafter(draft())},
    "got ModelDrafter: pass draft.model",
  ),
  "rule": (samples, {"rule": "block"}, "rule='block' is unknown"),
  "rule without draft": (samples, {"rule": "token", "draft": None}, "needs the draft model"),
  "eos": (samples, {"eos_id": 99}, r"eos_id\[0\]=99"),
  "temperature": (samples, {"warp": specjax.Warp(temperature=-1.0)}, "temperature"),
  "draft": (samples, {"draft": tabular.tabular(jax.random.key(0), 40)}, "40 tokens, the target 16"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_values(name, monkeypatch):
  monkeypatch.setattr(core, "score", lambda *_, **__: pytest.fail("before anything expensive"))
  make, settings, message = BAD[name]
  with pytest.raises((TypeError, ValueError), match=message):
    run(make(), **settings)


def test_the_drift_of_no_engine():
  with pytest.raises(TypeError, match=r"engine must be a specjax.LanguageModel, got NoneType"):
    drift(target(), None, samples())


@pytest.mark.parametrize(("values", "message"), [
  ((-1, 1.0, 0.1, 0.1, 0.1), "noise.drift=-1 must be finite and 0 or more"),
  ((0.0, float("nan"), 0.1, 0.1, 0.1), "noise.logits=nan must be finite and 0 or more"),
  ((0.0, float("inf"), 0.1, 0.1, 0.1), "noise.logits=inf must be finite"),
  ((0.0, 1.0, "0.1", 0.1, 0.1), "noise.mass='0.1' must be a number"),
  ((0.0, 1.0, 0.1, None, 0.1), "noise.outside=None must be a number"),
  ((0.0, 1.0, 0.1, 0.1, True), "noise.flips=True must be a number"),
  ((0.0, 1.0, 0.1, 5, 0.1), "noise.outside=5 must be a share from 0 to 1"),
])  # fmt: skip
def test_noise_that_can_not_be(values, message):
  with pytest.raises((TypeError, ValueError), match=message):
    core.Noise(*values)


def test_beyond_the_context():
  short = dataclasses.replace(target(), context_length=20)
  with pytest.raises(ValueError, match="generation 0 has 43 tokens, the target's context holds 20"):
    audit(short, samples())


def test_a_law_that_is_nan():
  table = target().params.at[0, 3, 3].set(jnp.nan)
  made = Samples([[3, 2], [3, 3, 3]], [[1], [3, 3, 3, 3, 1]])
  # Behind "3 3" at positions 3 and 6; tokens 1 and 4 of the second generation come next.
  with pytest.raises(ValueError, match="the target's law is NaN at token 1 of generation 1, and at 2 tokens in all"):
    audit(tabular.from_table(table), made, draft=draft())


def test_labels_are_those_of_the_rounds():
  labels = np.concatenate(samples().labels)
  assert set(labels) == set(LABELS)
  stats = [(labels == word).sum() for word in LABELS]
  # A round ends with a residual or a bonus token, unless the limit cut it off.
  assert stats[1] + stats[2] <= engines.ROWS * NEW - stats[0]

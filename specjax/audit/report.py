"""What an audit found: figures, and a verdict in words that reads them. Nothing is computed from tokens here."""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import rich.box
import rich.console
import rich.table
import rich.text

from specjax import files
from specjax.audit.stats import Evidence, Test
from specjax.audit.where import Contrast, Part

FAMILIES = 3  # of tests, which share alpha
LEAST_TOKENS = 250  # below, only a drift of a quarter of a standard deviation a token or more could be found

MEANINGS = {
  ("surprise", 1): "tokens are less likely than the law says: drawn too hot, or from the law of another context",
  ("surprise", -1): "tokens are more likely than the law says: drawn too cold, or with a truncation not declared",
  ("draft", 1): "tokens lean towards the drafter: acceptance is too lenient, or the residual keeps what it must not",
  ("draft", -1): "tokens lean away from the drafter: acceptance is too strict, or the residual overdoes it",
  ("argmax", 1): "the most likely token comes too often",
  ("argmax", -1): "the most likely token comes too rarely",
  ("repeat", 1): "recent tokens come back too often: a stale or shifted cache",
  ("repeat", -1): "recent tokens come back too rarely: a repetition penalty, or a stale cache",
  ("copy", 1): "generations of one prompt copy each other: random bits are shared",
  ("copy", -1): "generations of one prompt avoid each other",
  ("echo", 1): "generations made together repeat each other's tokens: random bits are shared",
  ("echo", -1): "generations made together avoid each other's tokens",
  ("serial", 1): "tokens lean towards the drafter where an accepted one before them did: tests of a round share a u",
  ("serial", -1): "tokens lean away from the drafter where an accepted one before them leaned to it",
  ("across", 1): "tokens lean towards the drafter where those of other rows do: rows share the u of their tests",
  ("across", -1): "tokens lean away from the drafter where those of other rows lean to it",
  ("stop", 1): "stop tokens come too often",
  ("stop", -1): "stop tokens come too rarely: are they left out of the samples, or overrun?",
  ("rank", 1): "the law's quantiles are not hit evenly",
}  # fmt: skip
READINGS = {
  "label": "the step that draws these is wrong, the others are right",
  "after": "what such a token leaves behind is wrong: caches, positions, or bits that serve twice",
  "row": "a batching fault: positions, masks or caches of rows get mixed up",
  "position": "what changes along a generation is wrong: caches, positions, or how the prompt is read",
  "context": "what changes with the length of the context is wrong: position ids, a window, the end of a buffer",
  "time": "the engine changed in the course of these samples",
}


@dataclasses.dataclass(frozen=True)
class Support:
  """Tokens that the law excludes.

  outside: how many; beyond: how many of them numerics can't excuse, which proves a fault.
  largest_margin: logits that one lacked to the least likely token allowed.
  largest_excess: mass of what is more likely than one, less top_p.
  p_value: of so many under the allowance. worst: (generation, position, token) of the clearest one.
  """

  outside: int
  beyond: int
  largest_margin: float
  largest_excess: float
  p_value: float
  worst: tuple[int, int, int] | None


@dataclasses.dataclass(frozen=True)
class LogprobCheck:
  """The engine's own log-probabilities: shares that are off by more than `tolerance` from those of the warped law, of
  the law with the temperature alone, and of the law without a warp; whether all are one number."""

  off_warped: float
  off_scaled: float
  off_raw: float
  all_equal: bool
  tolerance: float


@dataclasses.dataclass(frozen=True)
class Report:
  """The result of `specjax.audit.audit`; `str()` is a table, `to_json()` all figures, `plot(path)` a figure.

  ok: False: a fault; True: no sign of one; None: can't say. verdict: the same in words, with the evidence.
  generations, empty, tokens: counted; free_tokens: where the law left a choice.
  tests, skipped: the main tests, and the scores with too few tokens for one. temperature_scale: mean variance of the
    surprise: a relative error of e in the temperature moves the mean surprise by about e times this.
  rule_tests: of token verification's own laws; no evidence against the text.
  parts, contrast: where. support, behind_stop, beyond_limit, ended_early: what can't be. evidence: the e-process.
  logprobs: of the engine.
  draft_logprobs_off: share of the engine's draft log-probabilities that are not the draft model's; like `rule_tests`.
  """

  ok: bool | None
  verdict: str
  generations: int
  empty: int
  tokens: int
  free_tokens: int
  tests: tuple[Test, ...]
  skipped: tuple[str, ...]
  temperature_scale: float
  rule_tests: tuple[Test, ...]
  parts: tuple[Part, ...]
  contrast: Contrast | None
  support: Support
  behind_stop: int
  beyond_limit: int
  ended_early: int
  evidence: Evidence | None
  logprobs: LogprobCheck | None
  draft_logprobs_off: float | None
  from_text: bool
  greedy: bool
  alpha: float
  power: float
  noise: dict[str, float]

  @property
  def level(self) -> float:
    """Of each of three families: main tests, parts, and the number of tokens just outside the support."""
    return self.alpha / FAMILIES

  @property
  def findings(self) -> tuple[Test | Part, ...]:
    """The tests and parts that are significant, the clearest first."""
    entries: tuple[Test | Part, ...] = (*self.tests, *self.parts)
    significant = [entry for entry in entries if entry.adjusted <= self.level]
    return tuple(sorted(significant, key=lambda entry: (isinstance(entry, Part), -abs(entry.z))))

  def test(self, name: str) -> Test:
    """The main test of that score. KeyError if there is none."""
    return {t.name: t for t in self.tests}[name]

  def to_dict(self) -> dict[str, Any]:
    """All figures as plain values; numbers that are not finite are None."""
    return files.plain(dataclasses.asdict(self))

  def to_json(self) -> str:
    """`to_dict` as text."""
    return json.dumps(self.to_dict(), indent=2)

  def write(self, path: str | os.PathLike[str]) -> None:
    """Writes `to_json()`."""
    files.write_json(path, self)

  def figure(self) -> Any:
    """A matplotlib figure."""
    from specjax.audit import figure  # matplotlib takes a second to import

    return figure.draw(self)

  def plot(self, path: str | os.PathLike[str]) -> None:
    """Writes the figure in the format of the path's suffix."""
    from specjax.audit import figure

    figure.save(self, pathlib.Path(path))

  def __str__(self) -> str:
    console = rich.console.Console(width=118, no_color=True)
    with console.capture() as capture:
      console.print(rich.text.Text(self.verdict))
      console.print(_table(self.tests, self.level))
      if self.rule_tests:
        console.print(rich.text.Text("If the rule is token verification with this draft model:"))
        console.print(_table(self.rule_tests, self.alpha))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())

  def _repr_html_(self) -> str:
    """The same in a notebook."""
    return f"<pre>{rich.text.Text(str(self)).plain.replace('&', '&amp;').replace('<', '&lt;')}</pre>"


def conclude(report: Report) -> Report:
  """The report with `ok` and `verdict`."""
  proofs, signs, notes = _proofs(report), _signs(report), _notes(report)
  counted = report.tokens if report.greedy else report.free_tokens
  if (proofs or signs) and not report.from_text:
    head, ok = "FAULT: these tokens are not draws from the target's law.", False
  elif proofs or signs:
    head = "CAN'T SAY: the tokens were made from text, and the engine may have drawn others. Give token ids."
    ok = None
  elif counted < LEAST_TOKENS:
    words = "greedy tokens" if report.greedy else "tokens at which the law left a choice"
    head = f"CAN'T SAY: {counted} {words} are too few; {LEAST_TOKENS} are the least."
    ok = None
  else:
    head, ok = f"NO SIGN OF A FAULT in {report.tokens:,} tokens. {_reach(report)}", True
  return dataclasses.replace(
    report, ok=ok, verdict="\n".join([head, *(f"- {line}" for line in proofs + signs + notes)])
  )


def _proofs(report: Report) -> list[str]:
  out, support = [], report.support
  if support.worst is not None:
    generation, position, token = support.worst
    what = "are not the argmax" if report.greedy else "have probability 0 under the declared warp"
    out.append(
      f"{support.beyond} tokens {what}, by more than numerics can do: the clearest is token {token} at position "
      f"{position} of generation {generation}, {support.largest_margin:.3g} logits short."
    )
  if report.behind_stop:
    out.append(f"{report.behind_stop} generations go on behind a stop token.")
  if report.beyond_limit:
    out.append(f"{report.beyond_limit} generations have more tokens than they were allowed (max_new_tokens).")
  if report.ended_early:
    out.append(f"{report.ended_early} generations end before their limit, and with no stop token.")
  check = report.logprobs
  if check is not None and min(check.off_warped, check.off_scaled, check.off_raw) > 0.01:
    what = "are all the same number" if check.all_equal else "are not those of these tokens under the target"
    out.append(
      f"The engine's own log-probabilities {what}: {100 * check.off_warped:.0f} % are off by more than "
      f"{check.tolerance:g} (without the warp: {100 * check.off_raw:.0f} %)."
    )
  return out


def _signs(report: Report) -> list[str]:
  out = []
  if report.support.p_value < report.level:
    out.append(f"{report.support.outside} tokens lie just outside the support, more than numerics would bring there.")
  for entry in [e for e in report.findings if isinstance(e, Test)][:3]:
    size = f"z = {entry.z:+.1f}, p = {entry.adjusted:.1g}; the laws are at least {100 * entry.tv:.2g} % apart a token"
    out.append(f"{entry.name}: {MEANINGS[entry.name, 1 if entry.z > 0 else -1]} ({size}).")
  if not out:
    for part in [e for e in report.findings if isinstance(e, Part)][:2]:
      size = f"{place(part.grouping, [part.group])}: z = {part.z:+.1f}, p = {part.adjusted:.1g}"
      out.append(f"{part.score}: {MEANINGS[part.score, 1 if part.z > 0 else -1]} ({size}).")
  if out and report.contrast is not None:
    contrast = report.contrast
    out.append(
      f"Where: only {place(contrast.grouping, contrast.groups)} ({contrast.score}: z = {contrast.z_inside:+.1f} there, "
      f"{contrast.z_outside:+.1f} elsewhere): {READINGS[contrast.grouping]}."
    )
  return out


def _notes(report: Report) -> list[str]:
  out = []
  check, support = report.logprobs, report.support
  if check is not None and check.off_warped > 0.01 >= min(check.off_scaled, check.off_raw):
    which = "without the warp" if check.off_raw <= check.off_scaled else "of the temperature alone, before truncation"
    out.append(f"The engine's log-probabilities are those {which}.")
  if support.outside and not support.beyond:
    what = "are not the argmax" if report.greedy else "lie outside the support"
    out.append(
      f"{support.outside} tokens {what}, by at most {support.largest_margin:.2g} logits: numerics can do that."
    )
  if (off := report.draft_logprobs_off or 0.0) > 0.01:
    out.append(
      f"{100 * off:.0f} % of the engine's draft log-probabilities are not those of this draft "
      "model under the warp: it drafts from another law than it was said to."
    )
  for test in report.rule_tests:
    if test.adjusted <= report.alpha:
      out.append(
        f"{test.name} is not as token verification with this draft model makes it (z = {test.z:+.1f}). If the text "
        "shows no sign, the drafter's law is another one than said, or the rule is."
      )
  if report.empty:
    out.append(f"{report.empty} of {report.generations} generations are empty.")
  if report.skipped and not report.greedy:
    out.append(f"Too few tokens that matter for: {', '.join(report.skipped)}.")
  return out


def _reach(report: Report) -> str:
  """How small a fault would have been found."""
  if report.greedy:
    return f"All are the argmax, or within {report.noise['logits']:g} logits of it."
  words, tests = [], {t.name: t for t in report.tests}
  if "surprise" in tests and report.temperature_scale > 0:
    words.append(f"a temperature off by {100 * tests['surprise'].detectable / report.temperature_scale:.2g} %")
  if "draft" in tests:
    words.append(f"a lean of {tests['draft'].detectable:.2g} nats a token to or from the drafter")
  if "rank" in tests:
    words.append(f"quantiles off by a total variation of {100 * tests['rank'].detectable:.2g} %")
  return f"With power {report.power:g} it would have found {', or '.join(words)}."


def place(grouping: str, groups: Sequence[str]) -> str:
  """Words for some groups of a grouping: "rows 1 to 3", "bonus tokens"."""
  if grouping == "label":
    return f"{groups[0]} tokens"
  if grouping == "after":
    return f"tokens behind {groups[0]} ones"
  if grouping == "time":
    return f"the {' and the '.join(groups)} of the samples"
  first, last = groups[0].split(" to ")[0], groups[-1].split(" to ")[-1]
  what = {"row": "row", "position": "position", "context": "context length"}[grouping]
  return f"{what} {first}" if first == last else f"{what}s {first} to {last}"


def _table(tests: Sequence[Test], alpha: float) -> rich.table.Table:
  table = rich.table.Table(box=rich.box.MARKDOWN)
  columns = ("score", "tokens", "z", "p (Holm)", "excess a token", "95 %", "TV at least", "detectable", "")
  for index, column in enumerate(columns):
    table.add_column(column, justify="right" if index else "left")
  for t in tests:
    interval = "" if math.isnan(t.high) else f"{t.low:+.4f} to {t.high:+.4f}"
    table.add_row(
      *(t.name, f"{t.tokens:,}", f"{t.z:+.2f}", f"{t.adjusted:.2g}", f"{t.excess:+.4f}", interval, f"{t.tv:.4f}"),
      *(f"{t.detectable:.4f}", "fault" if t.adjusted <= alpha else ""),
    )
  return table

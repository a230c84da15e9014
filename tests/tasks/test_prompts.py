"""Prompts are whole, in a fixed order, and refused by name where there are none."""

import json

import pytest

from specjax.fetch import WIKIPEDIA, fetch
from specjax.tasks.prompts import prompts


def test_humaneval_is_complete_and_as_published() -> None:
  pool = prompts("humaneval", 164)
  assert {prompt.name for prompt in pool} == {f"HumanEval/{i}" for i in range(164)}
  assert {prompt.source for prompt in pool} == {"humaneval"}
  truncate = next(prompt for prompt in pool if prompt.name == "HumanEval/2")
  assert truncate.text.startswith("\n\ndef truncate_number(number: float) -> float:\n")
  assert truncate.text.endswith(">>> truncate_number(3.5)\n    0.5\n    " + '"""\n')


def test_wikipedia_is_the_first_80_words_of_a_longer_text() -> None:
  articles = json.loads(fetch(WIKIPEDIA).read_text(encoding="utf-8"))
  pool = prompts("wikipedia", 1000)
  assert len({prompt.name for prompt in pool}) == 1000
  for prompt in pool:
    extract = articles[prompt.name]["extract"].strip()
    assert extract.startswith(prompt.text)
    assert len(prompt.text.split()) == 80
    rest = extract.removeprefix(prompt.text)
    assert rest[0].isspace()
    assert len(rest.split()) >= 40


def test_no_article_that_is_long_enough_is_left_out() -> None:
  articles = json.loads(fetch(WIKIPEDIA).read_text(encoding="utf-8"))
  long_enough = sum(len(article["extract"].split()) >= 120 for article in articles.values())
  assert len(prompts("wikipedia", long_enough)) == long_enough
  with pytest.raises(ValueError, match=f"'wikipedia' holds 1 to {long_enough}"):
    prompts("wikipedia", long_enough + 1)


def test_mixed_takes_turns() -> None:
  pool = prompts("mixed", 5, seed=3)
  assert pool[::2] == prompts("humaneval", 3, seed=3)
  assert pool[1::2] == prompts("wikipedia", 2, seed=3)


@pytest.mark.parametrize("source", ["humaneval", "wikipedia", "mixed"])
def test_the_seed_decides_the_order(source: str) -> None:
  pool = prompts(source, 40)
  assert prompts(source, 40) == pool
  assert prompts(source, 7) == pool[:7]
  assert prompts(source, 40, seed=1) != pool


def test_the_order_does_not_change_between_versions() -> None:
  assert [prompt.name for prompt in prompts("mixed", 4)] == [
    "HumanEval/86",
    "Stonehenge",
    "HumanEval/143",
    "Chennai",
  ]


def test_bad_input() -> None:
  with pytest.raises(ValueError, match="Unknown prompt source 'xsum'; known are humaneval, wikipedia, mixed"):
    prompts("xsum", 1)
  with pytest.raises(ValueError, match="count=0 prompts asked for; 'humaneval' holds 1 to 164"):
    prompts("humaneval", 0)
  with pytest.raises(ValueError, match="count=165 prompts"):
    prompts("humaneval", 165)
  with pytest.raises(ValueError, match="count=329 prompts asked for; 'mixed' holds 1 to 328"):
    prompts("mixed", 329)

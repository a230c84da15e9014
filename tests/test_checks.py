"""What `init` and `sample` refuse, with which words and before anything is traced or compiled; and odd input they take.

What models, drafters and rules return is refused while it is traced.
"""

import dataclasses
import functools
import os
import subprocess
import sys

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import checks, sampler, verify
from specjax.models import tabular
from specjax.verify import Verdict

V = 5
ENTRIES = (specjax.sample, specjax.init)
PROMPTS = np.array([[1, 2, 3], [4, 0, 0]], np.int32)
compiled: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
  lambda event, _, **__: compiled.append(event) if "compile" in event else None
)


def untraceable(vocab_size=V, **fields):
  """A model that must not even be looked into."""

  def never(*_):
    raise AssertionError("traced")

  return specjax.LanguageModel(np.zeros(3, np.float32), never, never, vocab_size, **fields)


def refuse(monkeypatch, error, words, **changes):
  """`init` and `sample` raise one `error` with all `words` in its message, neither calling nor compiling a program."""
  for program in ("_sample", "_start"):
    monkeypatch.setattr(sampler, program, lambda *_, **__: pytest.fail("the program was called"))
  given = {"prompt_tokens": PROMPTS, "key": jax.random.key(0), "prompt_lengths": np.array([3, 1]), "max_new_tokens": 4}
  target, drafter = changes.pop("target", untraceable()), changes.pop("drafter", specjax.NGramDrafter())
  before, messages = len(compiled), []
  for entry in ENTRIES[: 1 if "verifier" in changes else 2]:
    with pytest.raises(error) as raised:
      entry(target, drafter, **(given | changes))
    messages.append(str(raised.value))
  assert len(compiled) == before
  assert all(word in messages[0] for word in words), messages[0]
  assert len(set(messages)) == 1, messages


def prompts(*rows):
  return {"prompt_tokens": np.array(rows), "prompt_lengths": None}


PROMPT_ERRORS = {
  "one row as a vector": (
    {"prompt_tokens": np.array([1, 2, 3])},
    ValueError,
    ["(3,)", "[B, P]", "prompt_tokens[None]"],
  ),
  "one row as a list": ({"prompt_tokens": [1, 2, 3]}, ValueError, ["(3,)", "[B, P]", "axis, [prompt_tokens]"]),
  "no row at all": ({"prompt_tokens": []}, ValueError, ["(0,)", "B >= 1"]),
  "one token": ({"prompt_tokens": 3}, ValueError, ["()", "[B, P]"]),
  "no rows": ({"prompt_tokens": np.zeros((0, 3), np.int32)}, ValueError, ["(0, 3)", "B >= 1"]),
  "no columns": ({"prompt_tokens": np.zeros((2, 0), np.int32)}, ValueError, ["(2, 0)", "P >= 1"]),
  "three axes": ({"prompt_tokens": np.zeros((2, 3, 1), np.int32)}, ValueError, ["(2, 3, 1)", "[B, P]"]),
  "ragged lists": ({"prompt_tokens": [[1, 2], [3]]}, ValueError, ["different lengths", "pad", "prompt_lengths"]),
  "text": ({"prompt_tokens": "hello"}, TypeError, ["prompt_tokens", "text", "tokenizer.encode(text)"]),
  "texts": ({"prompt_tokens": ["hello", "you"]}, TypeError, ["prompt_tokens", "text", "tokenizer.encode(text)"]),
  "nothing": ({"prompt_tokens": None}, ValueError, ["prompt_tokens", "object", "int32"]),
  "floats": ({"prompt_tokens": PROMPTS.astype(np.float32)}, TypeError, ["float32", "integers"]),
  "bools": ({"prompt_tokens": PROMPTS > 1}, TypeError, ["bool", "integers"]),
  "id too large": (prompts([0, 1], [2, V]), ValueError, ["prompt_tokens[1, 1]=5", "0 to 4", "vocabulary"]),
  "id negative": (prompts([0, -1], [2, 3]), ValueError, ["prompt_tokens[0, 1]=-1", "0 to 4"]),
  "id beyond int32": (prompts([0, 1], [2, 2**32]), ValueError, ["prompt_tokens[1, 1]=4294967296", "0 to 4"]),
  "id beyond int64": ({"prompt_tokens": [[2**70]]}, TypeError, ["prompt_tokens", "integers"]),
}

LENGTH_ERRORS = {
  "prompt of length 0": ({"prompt_lengths": np.array([3, 0])}, ValueError, ["prompt_lengths[1]=0", "1 to 3"]),
  "length negative": ({"prompt_lengths": np.array([-1, 1])}, ValueError, ["prompt_lengths[0]=-1", "1 to 3"]),
  "buffers beyond int32": ({"max_length": 10**13}, ValueError, ["max_length=10000000000000", "1073741824"]),
  "length beyond P": ({"prompt_lengths": np.array([3, 4])}, ValueError, ["prompt_lengths[1]=4", "1 to 3", "width"]),
  "length beyond int32": ({"prompt_lengths": np.array([3, 2**32 + 1])}, ValueError, ["4294967297", "1 to 3"]),
  "one length for all": ({"prompt_lengths": 3}, ValueError, ["prompt_lengths", "()", "int32[2]"]),
  "too few lengths": ({"prompt_lengths": np.array([3])}, ValueError, ["prompt_lengths", "(1,)", "2 rows"]),
  "too many lengths": ({"prompt_lengths": np.array([3, 1, 1])}, ValueError, ["prompt_lengths", "(3,)", "2 rows"]),
  "float lengths": ({"prompt_lengths": np.array([3.0, 1.0])}, TypeError, ["prompt_lengths", "float64", "integers"]),
  "max_new negative": ({"max_new_tokens": -1}, ValueError, ["max_new_tokens=-1", "0 to"]),
  "max_new negative in a row": ({"max_new_tokens": np.array([2, -3])}, ValueError, ["max_new_tokens[1]=-3", "0 to"]),
  "max_new one axis too many": ({"max_new_tokens": np.array([[2, 3]])}, ValueError, ["max_new_tokens", "(1, 2)"]),
  "max_new of another batch": ({"max_new_tokens": np.array([2, 3, 4])}, ValueError, ["max_new_tokens", "(3,)", "2"]),
  "max_new float": ({"max_new_tokens": 4.0}, TypeError, ["max_new_tokens=4.0", "integers"]),
  "max_new bool": ({"max_new_tokens": True}, TypeError, ["max_new_tokens=True", "integers"]),
  "max_new missing": ({"max_new_tokens": None}, TypeError, ["max_new_tokens=None", "integers"]),
  "max_new text": ({"max_new_tokens": "4"}, TypeError, ["max_new_tokens=4", "integers"]),
  "max_new fills int32": ({"max_new_tokens": 2**31 - 1}, ValueError, ["max_new_tokens=2147483647", "0 to"]),
  "max_new beyond int32": ({"max_new_tokens": 2**40}, ValueError, ["max_new_tokens=1099511627776", "0 to"]),
  "max_new beyond int64": ({"max_new_tokens": 2**70}, TypeError, ["max_new_tokens", "int32"]),
  "max_length float": ({"max_length": 128.0}, TypeError, ["max_length=128.0", "int"]),
  "max_length too small": ({"max_length": 8}, ValueError, ["max_length=8", "66"]),
  "gamma negative": ({"num_draft_tokens": -1}, ValueError, ["num_draft_tokens=-1", "at least 0"]),
  "gamma bool": ({"num_draft_tokens": True}, TypeError, ["num_draft_tokens=True", "int"]),
  "gamma float": ({"num_draft_tokens": 4.0}, TypeError, ["num_draft_tokens=4.0", "int"]),
  "gamma an array": ({"num_draft_tokens": np.array([4])}, TypeError, ["num_draft_tokens", "int"]),
  "chunk of nothing": ({"prefill_chunk": 0}, ValueError, ["prefill_chunk=0", "at least 1"]),
}

KEY_ERRORS = {
  "raw key": ({"key": np.array([0, 1], np.uint32)}, TypeError, ["uint32", "jax.random.key"]),
  "old-style key": ({"key": jax.random.PRNGKey(0)}, TypeError, ["uint32", "jax.random.key"]),
  "a seed": ({"key": 0}, TypeError, ["int", "jax.random.key"]),
  "no key": ({"key": None}, TypeError, ["NoneType", "jax.random.key"]),
  "three keys": ({"key": jax.random.split(jax.random.key(0), 3)}, ValueError, ["(3,)", "2 rows"]),
  # Under vmap these draw every row's bits from the first row's key.
  "rbg key": ({"key": jax.random.key(0, impl="rbg")}, ValueError, ["'rbg'", "threefry2x32"]),
  "a square of keys": ({"key": jax.random.split(jax.random.key(0), (2, 2))}, ValueError, ["(2, 2)", "2 rows"]),
}

STOP_ERRORS = {
  "stop id too large": ({"eos_id": V}, ValueError, ["eos_id", "=5", "0 to 4"]),
  "stop id negative": ({"eos_id": (1, -1)}, ValueError, ["eos_id[1]=-1", "0 to 4"]),
  "stop id beyond int64": ({"eos_id": 2**70}, ValueError, ["eos_id", str(2**70), "0 to 4"]),
  "stop id of numpy, float": ({"eos_id": np.array([1.0])}, TypeError, ["eos_id=array([1.])", "int"]),
  "stop id float": ({"eos_id": 2.0}, TypeError, ["eos_id=2.0", "int"]),
  "stop id bool": ({"eos_id": (True,)}, TypeError, ["eos_id=(True,)", "int"]),
  "stop id text": ({"eos_id": "</s>"}, TypeError, ["eos_id='</s>'", "int"]),
  "stop ids nested": ({"eos_id": [(1, 2)]}, TypeError, ["eos_id=[(1, 2)]", "int"]),
}


def undeclared(*_):
  """A rule that does not say whether it is lossless."""


RULE_ERRORS = {
  "unknown rule": ({"verifier": "tokens"}, ValueError, ["verifier='tokens'", "token"]),
  "no rule": ({"verifier": None}, TypeError, ["verifier=None", "lossless"]),
  "undeclared rule": ({"verifier": undeclared}, TypeError, ["undeclared", "lossless", "declare"]),
  "undeclared partial": ({"verifier": functools.partial(undeclared)}, TypeError, ["lossless", "declare"]),
}


@pytest.mark.parametrize("name", [*PROMPT_ERRORS, *LENGTH_ERRORS, *KEY_ERRORS, *STOP_ERRORS, *RULE_ERRORS])
def test_bad_arguments(monkeypatch, name):
  changes, error, words = (PROMPT_ERRORS | LENGTH_ERRORS | KEY_ERRORS | STOP_ERRORS | RULE_ERRORS)[name]
  refuse(monkeypatch, error, words, **changes)


ROWS = {"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}
WARP_ERRORS = [
  ("temperature", -1.0, ValueError, ["-1.0", ">= 0"]),
  ("temperature", -1e-9, ValueError, ["-1e-09", ">= 0"]),
  ("temperature", float("nan"), ValueError, ["nan", "finite"]),
  ("temperature", float("inf"), ValueError, ["inf", "finite"]),
  ("temperature", 1e39, ValueError, ["1e+39", "float32"]),  # infinite in float32
  ("temperature", 10**400, ValueError, ["beyond any float", "finite"]),
  ("temperature", np.array([1.0, np.nan]), ValueError, ["nan at row 1", "finite"]),
  ("temperature", jnp.array([-0.5, 1.0]), ValueError, ["-0.5 at row 0", ">= 0"]),
  ("temperature", True, TypeError, ["bool", "float32"]),
  ("temperature", 1j, TypeError, ["complex64", "float32"]),
  ("top_p", 0.0, ValueError, ["0.0", "(0, 1]"]),
  ("top_p", -0.1, ValueError, ["-0.1", "(0, 1]"]),
  ("top_p", 1.01, ValueError, ["1.01", "(0, 1]"]),
  ("top_p", float("nan"), ValueError, ["nan", "(0, 1]"]),
  ("top_p", 1e-50, ValueError, ["1e-50", "(0, 1]"]),  # 0 in float32
  ("top_p", np.array([0.5, 0.0]), ValueError, ["0.0 at row 1", "(0, 1]"]),
  ("top_k", -1, ValueError, ["-1", "from 0"]),
  ("top_k", np.array([3, -2]), ValueError, ["-2 at row 1", "from 0"]),
  ("top_k", np.int64(2**40), ValueError, [str(2**40), "2**31 - 1"]),  # int32 would make it 0
  ("top_k", 2**70, ValueError, [str(2**70), "2**31 - 1"]),
  ("top_k", 2.0, TypeError, ["float32", "integer"]),
  ("top_k", True, TypeError, ["bool", "integer"]),
  ("min_p", -0.1, ValueError, ["-0.1", "[0, 1]"]),
  ("min_p", 1.1, ValueError, ["1.1", "[0, 1]"]),
  ("min_p", float("nan"), ValueError, ["nan", "[0, 1]"]),
  *((name, [value] * 3, ValueError, ["(3,)", "2 rows"]) for name, value in ROWS.items()),
  *((name, [[value] * 2], TypeError, [str(value), "numpy.array"]) for name, value in ROWS.items()),
  *((name, ["1", "2"], TypeError, ["['1', '2']", "numpy.array"]) for name in ROWS),
  ("temperature", [0.5, -1], ValueError, ["-1.0 at row 1", ">= 0"]),
  ("top_k", [1.0, 2.0], TypeError, ["float", "integer"]),
  ("top_k", (3, -2), ValueError, ["-2 at row 1", "from 0"]),
  *((name, None, TypeError, ["None"]) for name in ROWS),
  *((name, "1", TypeError, ["'1'"]) for name in ROWS),
  *((name, np.array([value] * 3), ValueError, ["(3,)", "2 rows"]) for name, value in ROWS.items()),
  *((name, np.array([[value, value]]), ValueError, ["(1, 2)", "2 rows"]) for name, value in ROWS.items()),
]


@pytest.mark.parametrize(("name", "value", "error", "words"), WARP_ERRORS)
def test_bad_warps(monkeypatch, name, value, error, words):
  refuse(monkeypatch, error, [f"warp.{name}", *words], warp=specjax.Warp(**{name: value}))


@pytest.mark.parametrize("warp", [None, 1.0, {"temperature": 1.0}, (1.0, 0, 1.0, 0.0)])
def test_a_warp_of_another_type(monkeypatch, warp):
  refuse(monkeypatch, TypeError, ["specjax.Warp", type(warp).__name__], warp=warp)


def test_64_bit_mode(monkeypatch):
  with jax.enable_x64(True):
    refuse(monkeypatch, ValueError, ["jax_enable_x64", "jax.enable_x64(False)"])


@pytest.mark.parametrize("eos_id", [(1, 2), [1, 2], np.array([1, 2]), {1, 2}])
def test_stop_ids_of_any_collection(eos_id):
  np.testing.assert_array_equal(checks.stop_ids(eos_id, V), [1, 2])
  np.testing.assert_array_equal(checks.stop_ids(np.int64(3), V), [3])


@pytest.mark.parametrize("target", ["smollm2-135m", None, specjax.ModelDrafter(untraceable())])
def test_a_target_of_another_type(monkeypatch, target):
  refuse(monkeypatch, TypeError, ["target", type(target).__name__, "specjax.load_model"], target=target)


def test_a_target_that_is_no_pytree_of_arrays(monkeypatch):
  target = dataclasses.replace(untraceable(), params={"weight": "model.gguf"})
  refuse(monkeypatch, TypeError, ["target", "'model.gguf'", "arrays"], target=target)


@pytest.mark.parametrize(("size", "error"), [(5.0, TypeError), (0, ValueError), (True, TypeError)])
def test_a_vocabulary_of_no_size(monkeypatch, size, error):
  refuse(monkeypatch, error, ["target.vocab_size", str(size)], target=untraceable(size))


DRAFTER_ERRORS = {
  "a model of None": (specjax.ModelDrafter(None), TypeError, ["ModelDrafter.model", "load it first"]),  # type: ignore
  "a vocabulary of 5.0": (specjax.ModelDrafter(untraceable(5.0)), TypeError, ["draft model's vocab_size", "5.0"]),
  "none": (None, TypeError, ["NoneType", "NGramDrafter", "num_draft_tokens=0"]),
  "a model": (untraceable(), TypeError, ["LanguageModel", "specjax.ModelDrafter(model)"]),
  "a name": ("ngram", TypeError, ["str", "NGramDrafter"]),
  "a class": (specjax.NGramDrafter, TypeError, ["NGramDrafter", "instance"]),
  "a model by name": (specjax.ModelDrafter("smollm2-135m"), TypeError, ["'smollm2-135m'", "loaded"]),  # type: ignore
  "another vocabulary": (specjax.ModelDrafter(untraceable(2000)), ValueError, ["2000", "5", "tokenizer"]),
}


@pytest.mark.parametrize("name", DRAFTER_ERRORS)
def test_bad_drafters(monkeypatch, name):
  drafter, error, words = DRAFTER_ERRORS[name]
  refuse(monkeypatch, error, words, drafter=drafter)


def test_different_tokenizers(monkeypatch):
  drafter = specjax.ModelDrafter(untraceable(tokenizer_hash="a"))
  refuse(monkeypatch, ValueError, ["different tokenizers"], target=untraceable(tokenizer_hash="b"), drafter=drafter)


@pytest.mark.parametrize("max_new", [5, 2**30 - 3, np.array([5, 0]), np.array([0, 10])])
def test_beyond_the_context(monkeypatch, max_new):
  """Row 0 holds 3 tokens, row 1 one; the context 7. Limits that are summed in int32 must not wrap around."""
  totals = np.add(max_new, [3, 1])
  row, total = int(totals.argmax()), int(totals.max())
  small = untraceable(context_length=7)
  refuse(
    monkeypatch, ValueError, [f"row {row}", f"{total} tokens", "target", "7"], target=small, max_new_tokens=max_new
  )
  drafter = specjax.ModelDrafter(small)
  refuse(monkeypatch, ValueError, [f"row {row}", "draft model", "7"], drafter=drafter, max_new_tokens=max_new)


@pytest.mark.parametrize(
  ("draft", "target", "match"),
  [
    (6, 8, True),
    (8, 6, True),
    (49_152, 49_152, True),
    (50_257, 50_304, True),  # to a multiple of 64
    (151_936, 152_064, True),  # two sizes of one family, to multiples of 128 and 512
    (32_000, 32_001, False),
    (32_000, 50_257, False),
    (5, 2000, False),
    (1000, 3072, False),
  ],
)
def test_vocabularies_match_up_to_padding(draft, target, match):
  assert checks.vocabularies_match(draft, target) == match


def test_traced_sizes_are_refused(monkeypatch):
  for program in ("_sample", "_start"):
    monkeypatch.setattr(sampler, program, lambda *_, **__: pytest.fail("the program was called"))
  given = {"prompt_tokens": PROMPTS, "key": jax.random.key(0)}
  sample, init = (functools.partial(f, untraceable(), specjax.NGramDrafter(), **given) for f in ENTRIES)
  with pytest.raises(TypeError, match=r"max_new_tokens is traced.*result.*specjax\.init"):
    jax.jit(lambda n: sample(max_new_tokens=n, max_length=128))(4)
  with pytest.raises(TypeError, match=r"max_new_tokens is traced.*pass max_length"):
    jax.jit(lambda n: init(max_new_tokens=n))(4)
  with pytest.raises(ValueError, match=r"max_length=65 .*66 slots"):
    jax.jit(lambda n: init(max_new_tokens=n, max_length=65))(4)
  for name in ("num_draft_tokens", "prefill_chunk", "max_length"):
    for call in (sample, init):
      with pytest.raises(TypeError, match=rf"{name}=.*int"):
        jax.jit(lambda n, call=call, name=name: call(**{name: n}))(4)


def returning(**changes):
  """A toy whose `apply` returns something else: `logits` and `cache` are functions of the right ones."""
  model = tabular.tabular(jax.random.key(7), V)

  def odd_apply(*arguments):
    logits, cache = model.apply(*arguments)
    logits, cache = changes.get("logits", lambda x: x)(logits), changes.get("cache", lambda x: x)(cache)
    return changes.get("both", lambda *x: x)(logits, cache)

  return dataclasses.replace(model, apply=odd_apply)


MODEL_ERRORS = {
  "half precision": ({"logits": lambda x: x.astype(jnp.bfloat16)}, ["logits bfloat16[2,64,5]", "float32[2,64,5]"]),
  "another vocabulary": (
    {"logits": lambda x: x[..., :3]},
    ["logits float32[2,64,3]", "float32[2,64,5]", "int32[2,64]"],
  ),
  "the last position alone": ({"logits": lambda x: x[:, -1]}, ["logits float32[2,5]", "float32[2,64,5]"]),
  "no cache": ({"both": lambda logits, cache: logits}, ["must return (logits float32[2,64,5], cache)"]),
  "a third value": ({"both": lambda *x: (*x, None)}, ["tuple", "must return (logits float32[2,64,5], cache)"]),
  "a longer cache": ({"cache": lambda x: jnp.pad(x, ((0, 0), (0, 1)))}, ["cache", "int32[2,129]", "int32[2,128]"]),
  "a cache of another type": ({"cache": lambda x: x.astype(jnp.float32)}, ["cache", "float32[2,128]", "int32[2,128]"]),
  "a wrapped cache": ({"cache": lambda x: {"k": x}}, ["cache", "{'k': *}", "structure"]),
}


@pytest.mark.parametrize("name", MODEL_ERRORS)
def test_what_a_model_returns(name):
  changes, words = MODEL_ERRORS[name]
  right, wrong = tabular.tabular(jax.random.key(7), V), returning(**changes)
  for target, drafter in ((wrong, specjax.NGramDrafter()), (right, specjax.ModelDrafter(wrong))):
    messages = []
    for entry in ENTRIES:
      with pytest.raises(TypeError, match=r"test_checks.*odd_apply returned") as raised:
        entry(target, drafter, PROMPTS, key=jax.random.key(0), max_length=128, max_new_tokens=9)
      messages.append(str(raised.value))
    assert all(word in messages[0] for word in words), messages[0]
    assert len(set(messages)) == 1


def test_where_a_cache_differs():
  """Of a cache with many arrays, the one is named."""
  model = dataclasses.replace(
    untraceable(),
    apply=lambda params, tokens, cache, start: (jnp.zeros((*tokens.shape, V)), {**cache, "v": cache["v"][1:]}),
    init_cache=lambda params, batch, length: {"k": jnp.zeros((3, batch)), "v": jnp.zeros((3, batch))},
  )
  with pytest.raises(TypeError, match=r"cache with float32\[2,2\] at \['v'\]; it must be float32\[3,2\]"):
    specjax.init(model, None, PROMPTS, key=jax.random.key(0), num_draft_tokens=0)


def one_step(**settings):
  """Traces a round, compiling nothing."""
  target, drafter = language(), settings.pop("drafter", specjax.NGramDrafter())
  init = functools.partial(specjax.init, language(), settings.pop("first", drafter), PROMPTS, num_draft_tokens=2)
  return jax.eval_shape(lambda key: specjax.step(init(key=key), target, drafter, **settings), jax.random.key(0))


VERDICT_ERRORS = {
  "a tuple": (lambda n, token: (n, token), ["('int32[]', 'int32[]')"]),
  "nothing": (lambda n, token: None, ["None"]),
  "a number": (lambda n, token: n, ["int32[]"]),
  "floats": (lambda n, token: Verdict(n, token.astype(jnp.float32)), ["float32[]", "num_accepted='int32[]'"]),
  "bytes": (lambda n, token: Verdict(n.astype(jnp.uint8), token), ["uint8[]", "next_token='int32[]'"]),
  "a vector": (lambda n, token: Verdict(n, token[None]), ["int32[1]"]),
  "a bool": (lambda n, token: Verdict(n > 0, token), ["bool[]"]),
}


@pytest.mark.parametrize("name", VERDICT_ERRORS)
def test_what_a_rule_returns(name):
  odd, words = VERDICT_ERRORS[name]

  @verify.declare(lossless=False)
  def odd_rule(*arguments):
    return odd(*verify.token(*arguments))

  with pytest.raises(
    TypeError, match=r"odd_rule returned.*Verdict\(num_accepted, next_token\), two int32 scalars"
  ) as raised:
    one_step(verifier=odd_rule)
  assert all(word in str(raised.value) for word in words), raised.value
  with pytest.raises(TypeError, match=r"odd_rule returned"):
    sample(verifier=odd_rule)


def test_python_ints_are_a_verdict():
  rule = verify.declare(lossless=False)(lambda *_: Verdict(0, 1))
  assert one_step(verifier=rule)[1].num_accepted.shape == (2,)


PROPOSAL_ERRORS = {
  "tokens": (lambda x: {"tokens": x.tokens[:, :1]}, ["tokens: int32[2,1]", "int32[2,2]"]),
  "no law": (lambda x: {"log_q": x.log_q[..., 0]}, ["log_q: float32[2,2]", "float32[2,2,5]"]),
  "law in half precision": (lambda x: {"log_q": x.log_q.astype(jnp.bfloat16)}, ["log_q: bfloat16[2,2,5]"]),
  "count": (lambda x: {"num_drafted": x.num_drafted.astype(jnp.float32)}, ["num_drafted: float32[2]", "int32[2]"]),
  "state": (lambda x: {"state": (x.tokens,)}, ["state", "structure", "(*,)"]),
}


@pytest.mark.parametrize("name", PROPOSAL_ERRORS)
def test_what_a_drafter_returns(name):
  odd, words = PROPOSAL_ERRORS[name]

  @jax.tree_util.register_dataclass
  @dataclasses.dataclass(frozen=True)
  class OddDrafter(specjax.NGramDrafter):
    def propose(self, state, context, num_draft_tokens):
      proposal = super().propose(state, context, num_draft_tokens)
      return dataclasses.replace(proposal, **odd(proposal))

  with pytest.raises(TypeError, match=r"OddDrafter\.propose returned") as raised:
    one_step(drafter=OddDrafter())
  assert all(word in str(raised.value) for word in words), raised.value


def test_what_step_refuses():
  """Models, drafters and rules, with the words of `sample`."""
  for drafter in DRAFTER_ERRORS:
    value, error, words = DRAFTER_ERRORS[drafter]
    with pytest.raises(error) as raised:
      one_step(drafter=value, first=specjax.NGramDrafter())
    assert all(word in str(raised.value) for word in words), raised.value
  for changes, error, words in RULE_ERRORS.values():
    with pytest.raises(error) as raised:
      one_step(**changes)
    assert all(word in str(raised.value) for word in words), raised.value
  with pytest.raises(TypeError, match=r"state must be .*SpecState, got NoneType.*specjax\.init"):
    specjax.step(None, untraceable(), None)  # type: ignore


def test_a_model_is_shown_by_its_sizes():
  params = {"a": jnp.zeros((1000, 3)), "b": np.zeros(7, np.float16), "c": jax.ShapeDtypeStruct((2, 2), np.float32)}
  model = dataclasses.replace(untraceable(49_152, context_length=2048), params=params)
  text = "LanguageModel(vocab_size=49152, 3,011 parameters in float32 and float16, context_length=2048)"
  assert repr(model) == text
  assert repr(specjax.ModelDrafter(model)) == f"ModelDrafter(model={text})"
  # jax shows pytrees whose leaves are no arrays when it explains an error.
  assert "0 parameters in no array" in repr(dataclasses.replace(model, params=None))
  assert "str" in repr(dataclasses.replace(model, params="weights"))


def test_modules_are_attributes():
  code = "import specjax; specjax.models.tabular.law, specjax.verify.declare, specjax.keys.fold, specjax.warp.log_probs"
  subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})


traces: list[int] = []


@functools.cache
def language():
  """A toy that notes when it is traced."""
  model = tabular.tabular(jax.random.key(7), V)

  def apply(*arguments):
    traces.append(1)
    return model.apply(*arguments)

  return dataclasses.replace(model, apply=apply)


def sample(prompt_tokens=PROMPTS, prompt_lengths=(3, 1), **settings):
  settings = {"max_new_tokens": 4, "num_draft_tokens": 2, "max_length": 128, "eos_id": 2} | settings
  target, drafter = settings.pop("target", language()), settings.pop("drafter", specjax.NGramDrafter())
  lengths = np.array(prompt_lengths) if isinstance(prompt_lengths, tuple) else prompt_lengths
  return specjax.sample(target, drafter, prompt_tokens, key=jax.random.key(0), prompt_lengths=lengths, **settings)


def same(left, right):
  jax.tree.map(np.testing.assert_array_equal, left, right)


FORMS = {
  "jax arrays": lambda: sample(jnp.asarray(PROMPTS), jnp.array([3, 1]), max_new_tokens=jnp.array([4, 4])),
  "lists": lambda: sample(PROMPTS.tolist(), [3, 1], max_new_tokens=[4, 4]),
  "int64": lambda: sample(PROMPTS.astype(np.int64), np.array([3, 1], np.int64), max_new_tokens=np.int64(4)),
  "unsigned bytes": lambda: sample(PROMPTS.astype(np.uint8), np.array([3, 1], np.uint8)),
  "any padding": lambda: sample(np.array([[1, 2, 3], [4, -7, 2**40]])),
  "stop tokens in a tuple": lambda: sample(eos_id=(2,)),
  "stop tokens in a list": lambda: sample(eos_id=[np.int64(2)]),
  "stop tokens in a range": lambda: sample(eos_id=range(2, 3)),
  "filters that keep all": lambda: sample(warp=specjax.Warp(top_k=2**31 - 1, top_p=1 + 1e-12)),
  "settings in lists": lambda: sample(warp=specjax.Warp([1.0, 1], (0, 0), [1.0, 1.0], [0, 0])),
  "settings by row": lambda: sample(warp=specjax.Warp(np.ones(2), np.zeros(2, np.uint8), jnp.ones(2), np.float16(0))),
  "whole temperature": lambda: sample(warp=specjax.Warp(temperature=1)),
  "numpy gamma": lambda: sample(num_draft_tokens=np.int64(2)),
  "a rule by function": lambda: sample(verifier=verify.token),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_the_same_call(form):
  """The same result from the same program."""
  expected = sample()
  before = len(traces)
  same(FORMS[form](), expected)
  assert len(traces) == before > 0


def test_lengths_default_to_the_width():
  same(sample(prompt_lengths=None), sample(prompt_lengths=(3, 3)))


def test_no_new_tokens():
  result = sample(max_new_tokens=0)
  np.testing.assert_array_equal(result.tokens, [[1, 2, 3], [4, 0, 0]])
  np.testing.assert_array_equal(result.lengths, [3, 1])
  np.testing.assert_array_equal(result.stats.rounds, 0)
  mixed = sample(max_new_tokens=np.array([0, 2]))
  np.testing.assert_array_equal(mixed.lengths, [3, 3])
  np.testing.assert_array_equal(mixed.tokens[0], [1, 2, 3, 0, 0])


def test_prompts_of_one_token():
  same(sample(np.array([[1], [4]]), None).tokens[1, :5], sample(np.array([[1, 2, 3], [4, 0, 0]])).tokens[1, :5])


def test_context_and_buffer_may_be_filled_to_the_last_slot():
  exact = dataclasses.replace(language(), context_length=7)
  fill = functools.partial(sample, target=exact, prompt_lengths=None, prefill_chunk=2)
  same(fill(max_length=10), sample(prompt_lengths=None))
  assert fill(max_length=10).lengths.max() == 7
  with pytest.raises(ValueError, match=r"max_length=9.*10"):
    fill(max_length=9)


def test_no_drafter_is_needed_without_drafts():
  result = sample(num_draft_tokens=0, drafter="none", eos_id=None)
  np.testing.assert_array_equal(result.lengths, [7, 5])
  assert result.stats.tested.shape == (2, 0)


def test_all_but_sizes_may_be_traced():
  """Under an outer jit. Traced lengths hide what is padding; whatever is no padding for sure is checked still."""
  padded = np.array([[1, 2, 3], [4, -7, 99]])

  def call(target, warp, lengths):
    return sample(padded, lengths, target=target, drafter=specjax.ModelDrafter(target), warp=warp, num_draft_tokens=1)

  assert jax.eval_shape(call, language(), specjax.Warp(0.0), np.array([3, 1])).tokens.shape == (2, 7)
  with pytest.raises(ValueError, match=r"prompt_tokens\[1, 0\]=9 "):
    jax.eval_shape(lambda lengths: sample(np.array([[1, 2], [9, 2]]), lengths), np.array([2, 1]))

"""Token ids against those of other implementations, chat templates, and tokenizers that cannot be rebuilt."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from gguf import TokenType

from specjax.models.checkpoint import hash_tokens
from specjax.models.gguf import open_gguf
from specjax.models.huggingface import open_huggingface
from specjax.models.tokenizer import Tokenizer, load_tokenizer
from tests import checkpoints, gguf_files

# llama.cpp and transformers 5.24 agree on all of these.
CASES = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "smollm2_tokenizer.json").read_text())
MESSAGES = [{"role": "user", "content": "Hi"}]
TEMPLATE = "{% for m in messages %}\n  {{ m.role }}:{{ m.content }}{{ eos_token }}\n{% endfor %}"
SPECIAL = {"<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL, "<tool>": TokenType.USER_DEFINED}


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
  return load_tokenizer("smollm2-135m")


@pytest.fixture(scope="module")
def as_directory(smollm2: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
  """The same tokenizer as tokenizer.json."""
  directory = tmp_path_factory.mktemp("smollm2")
  smollm2.backend.save(str(directory / "tokenizer.json"))
  settings = {"eos_token": "<|im_end|>", "chat_template": smollm2.chat_template}
  (directory / "tokenizer_config.json").write_text(json.dumps(settings))
  return directory


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case["text"][:12]))
def test_golden_ids(smollm2: Tokenizer, case: dict[str, Any]) -> None:
  assert smollm2.encode(case["text"]) == case["ids"]
  assert smollm2.decode(case["ids"]) == case["text"]


def test_smollm2_chat(smollm2: Tokenizer) -> None:
  expected = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nHi<|im_end|>\n"
  )
  ids = smollm2.chat(MESSAGES)
  assert smollm2.decode(ids) == expected + "<|im_start|>assistant\n"
  assert ids[0] == 1
  assert smollm2.decode(smollm2.chat(MESSAGES, add_generation_prompt=False)) == expected
  own = [{"role": "system", "content": "Be brief."}, *MESSAGES]
  assert smollm2.decode(smollm2.chat(own)).startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")


def test_smollm2_facts(smollm2: Tokenizer) -> None:
  assert smollm2.vocab_size == 49_152
  assert smollm2.eos_ids == (2,)
  assert smollm2.special_tokens["bos_token"] == "<|im_start|>"
  assert len(repr(smollm2)) < 500


def test_gguf_and_directory_are_the_same_tokenizer(smollm2: Tokenizer, as_directory: pathlib.Path) -> None:
  other = load_tokenizer(as_directory)
  for case in CASES:
    assert other.encode(case["text"]) == case["ids"]
    assert other.decode(case["ids"]) == case["text"]
  assert other.chat(MESSAGES) == smollm2.chat(MESSAGES)
  assert (other.vocab_size, other.eos_ids) == (smollm2.vocab_size, smollm2.eos_ids)
  checkpoints.write("gpt2", as_directory)
  assert open_huggingface(as_directory).tokenizer_hash == open_gguf(smollm2.source).tokenizer_hash


def test_decode_takes_arrays_and_refuses_what_is_no_id(smollm2: Tokenizer) -> None:
  ids = smollm2.encode("Hello, world!")
  assert smollm2.decode(np.array(ids, np.int32)) == "Hello, world!"
  assert smollm2.decode([]) == ""
  assert smollm2.decode([*ids, 49_152 + 5]) == "Hello, world!"  # a row that pads the embedding
  with pytest.raises(ValueError, match="-1"):
    smollm2.decode([1, -1])
  with pytest.raises(TypeError):
    smollm2.decode([1.5])  # pyrefly: ignore[bad-argument-type]


def write_gguf(path: pathlib.Path, pre: str, merges: Sequence[str] = ("x y",), **extra: Any) -> None:
  """A GGUF file with a small tokenizer: 256 bytes, what the merges make, "<s>", "</s>" and "<tool>"."""
  values = gguf_files.byte_level_vocabulary(pre, list(merges), SPECIAL)
  first = 256 + len(merges)
  values |= {"tokenizer.ggml.bos_token_id": first, "tokenizer.ggml.eos_token_id": first + 1}
  values |= {f"tokenizer.{key.replace('__', '.')}": value for key, value in extra.items()}
  tokens = {"general.architecture": "llama"} | {key: value for key, value in values.items() if value is not None}
  gguf_files.save(path, tokens, {"x": np.ones((2, 2), np.float32)})


def pieces(pre: str, text: str, path: pathlib.Path) -> list[str]:
  """The pieces that `text` is cut into before any merge."""
  write_gguf(path, pre)
  backend = load_tokenizer(path).backend
  return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


TEXT = "I'm HE'S 12345 x1.\n\n  if a!=b:\n\tß naïve"


@pytest.mark.parametrize(
  ("pre", "expected"),
  [
    ("gpt-2", "I|'m| HE|'|S| 12345| x|1|.|\n\n | if| a|!=|b|:|\n|\t|ß| naïve"),
    ("smollm", "I|'m| HE|'|S| |1|2|3|4|5| x|1|.|\n\n | if| a|!=|b|:|\n|\t|ß| naïve"),
    ("qwen2", "I|'m| HE|'S| |1|2|3|4|5| x|1|.\n\n| | if| a|!=|b|:\n|\tß| naïve"),
    ("llama-bpe", "I|'m| HE|'S| |123|45| x|1|.\n\n| | if| a|!=|b|:\n|\tß| naïve"),
  ],
)
def test_pre_tokenizers(pre: str, expected: str, tmp_path: pathlib.Path) -> None:
  """Cut by hand from the published patterns of each family."""
  assert "|".join(pieces(pre, TEXT, tmp_path / "model.gguf")) == expected


def test_qwen2_composes_characters_and_others_do_not(tmp_path: pathlib.Path) -> None:
  for pre, count in {"qwen2": 2, "gpt-2": 3}.items():
    write_gguf(tmp_path / "model.gguf", pre)
    assert len(load_tokenizer(tmp_path / "model.gguf").encode("a\u0301")) == count


def test_merges_are_applied_by_rank(tmp_path: pathlib.Path) -> None:
  write_gguf(tmp_path / "model.gguf", "gpt-2", ["b c", "a b", "a bc"])
  tokenizer = load_tokenizer(tmp_path / "model.gguf")
  assert tokenizer.encode("abc") == [258]
  assert tokenizer.encode("ab") == [257]
  assert tokenizer.decode([258, 257]) == "abcab"


def test_llama_takes_whole_pieces_without_merges(tmp_path: pathlib.Path) -> None:
  """ "abc" is a token, but the merge of "a" and "b" comes first and leads away from it."""
  for pre, ids in {"llama-bpe": [258], "gpt-2": [256, 66]}.items():
    write_gguf(tmp_path / "model.gguf", pre, ["a b", "b c", "a bc"], ggml__add_bos_token=False)
    assert load_tokenizer(tmp_path / "model.gguf").encode("abc") == ids


def test_special_tokens_are_recognised_in_text(tmp_path: pathlib.Path) -> None:
  write_gguf(tmp_path / "model.gguf", "gpt-2")
  tokenizer = load_tokenizer(tmp_path / "model.gguf")
  ids = tokenizer.encode("<s>a<tool></s>")
  assert [ids[0], *ids[2:]] == [257, 259, 258]
  assert tokenizer.decode(ids) == "<s>a<tool></s>"


@pytest.mark.parametrize(
  ("pre", "extra", "bos", "eos"),
  [
    ("gpt-2", {}, False, False),
    ("gpt-2", {"ggml__add_bos_token": True}, True, False),
    ("gpt-2", {"ggml__add_bos_token": True, "ggml__add_eos_token": True}, True, True),
    ("gpt-2", {"ggml__add_eos_token": True}, False, True),
    ("llama-bpe", {}, True, False),
    ("llama-bpe", {"ggml__add_bos_token": False}, False, False),
  ],
)
def test_what_is_added_around_a_text(
  pre: str, extra: dict[str, Any], bos: bool, eos: bool, tmp_path: pathlib.Path
) -> None:
  write_gguf(tmp_path / "model.gguf", pre, **extra, chat_template=TEMPLATE)
  tokenizer = load_tokenizer(tmp_path / "model.gguf")
  text = tokenizer.decode(tokenizer.encode("a"))
  assert text == ("<s>" if bos else "") + "a" + ("</s>" if eos else "")
  assert tokenizer.decode(tokenizer.chat(MESSAGES)) == "  user:Hi</s>\n"  # a template writes its own


def test_padding_is_no_token(tmp_path: pathlib.Path) -> None:
  values = gguf_files.byte_level_vocabulary("gpt-2", ["x y"], {"<s>": TokenType.CONTROL, "[PAD258]": TokenType.UNUSED})
  gguf_files.save(
    tmp_path / "model.gguf", {"general.architecture": "llama"} | values, {"x": np.ones((2, 2), np.float32)}
  )
  tokenizer = load_tokenizer(tmp_path / "model.gguf")
  assert tokenizer.vocab_size == 258
  assert 258 not in tokenizer.encode("[PAD258]")
  assert hash_tokens({i: t for t, i in tokenizer.backend.get_vocab().items()}) == hash_tokens(
    dict(enumerate(values["tokenizer.ggml.tokens"][:258]))
  )


def directory_with(tmp_path: pathlib.Path, **files: Any) -> pathlib.Path:
  """A directory with a small tokenizer.json and more JSON files."""
  write_gguf(tmp_path / "model.gguf", "gpt-2")
  load_tokenizer(tmp_path / "model.gguf").backend.save(str(tmp_path / "tokenizer.json"))
  for name, content in files.items():
    (tmp_path / f"{name}.json").write_text(json.dumps(content))
  return tmp_path


def test_end_tokens_of_a_directory(tmp_path: pathlib.Path) -> None:
  directory = directory_with(
    tmp_path,
    generation_config={"eos_token_id": [259, 258]},
    config={"eos_token_id": 258},
    tokenizer_config={"eos_token": {"content": "<s>"}, "bos_token": None},
  )
  tokenizer = load_tokenizer(directory)
  assert tokenizer.eos_ids == (259, 258, 257)
  assert dict(tokenizer.special_tokens) == {"eos_token": "<s>"}


def test_truncation_and_padding_of_a_file_are_off(tmp_path: pathlib.Path) -> None:
  path = directory_with(tmp_path) / "tokenizer.json"
  content = json.loads(path.read_text())
  content["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
  content["padding"] = {
    "strategy": {"Fixed": 9},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "!",
  }
  path.write_text(json.dumps(content))
  assert len(load_tokenizer(tmp_path).encode("abcd")) == 4


@pytest.mark.parametrize("form", ["file", "string", "list"])
def test_where_a_template_may_be(form: str, tmp_path: pathlib.Path) -> None:
  settings: dict[str, Any] = {"eos_token": "</s>"}
  if form == "string":
    settings["chat_template"] = TEMPLATE
  elif form == "list":
    settings["chat_template"] = [{"name": "rag", "template": "no"}, {"name": "default", "template": TEMPLATE}]
  directory = directory_with(tmp_path, tokenizer_config=settings)
  if form == "file":
    (directory / "chat_template.jinja").write_text(TEMPLATE)
  tokenizer = load_tokenizer(directory)
  assert tokenizer.decode(tokenizer.chat(MESSAGES)) == "  user:Hi</s>\n"


def chat(template: str, tmp_path: pathlib.Path, messages: Any = MESSAGES) -> str:
  write_gguf(tmp_path / "model.gguf", "gpt-2", chat_template=template)
  tokenizer = load_tokenizer(tmp_path / "model.gguf")
  return tokenizer.decode(tokenizer.chat(messages))


def test_what_templates_can_use(tmp_path: pathlib.Path) -> None:
  assert chat("{{ {'a': '<é>'} | tojson }}", tmp_path) == '{"a": "<é>"}'
  assert chat("{{ strftime_now('%Y') }}", tmp_path).isdigit()
  assert chat("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", tmp_path) == "01"
  assert chat("a\n  {% if true %}\nb{% endif %}", tmp_path) == "a\nb"
  assert chat("{% if tools is none %}no tools{% endif %}", tmp_path) == "no tools"


@pytest.mark.parametrize(
  ("template", "message"),
  [
    ("{{ raise_exception('Roles must alternate.') }}", r"Roles must alternate\."),
    ("{{ messages[0]['name'] + 'x' }}", "name"),
    ("{% for %}", "chat template of"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe"),
  ],
)
def test_templates_that_fail(template: str, message: str, tmp_path: pathlib.Path) -> None:
  with pytest.raises(ValueError, match=message):
    chat(template, tmp_path)


def test_messages_that_are_none(tmp_path: pathlib.Path) -> None:
  with pytest.raises(ValueError, match="'H'"):
    chat(TEMPLATE, tmp_path, "Hi")
  with pytest.raises(ValueError, match=r"\{'content': 'Hi'\}"):
    chat(TEMPLATE, tmp_path, [{"content": "Hi"}])


def test_no_template(tmp_path: pathlib.Path) -> None:
  write_gguf(tmp_path / "model.gguf", "gpt-2")
  with pytest.raises(ValueError, match="no chat template"):
    load_tokenizer(tmp_path / "model.gguf").chat(MESSAGES)


def test_tokenizers_that_cannot_be_had(tmp_path: pathlib.Path) -> None:
  path = tmp_path / "model.gguf"
  write_gguf(path, "tekken")
  with pytest.raises(ValueError, match=r"'tekken', which is not supported\. Supported are gpt-2, smollm, qwen2"):
    load_tokenizer(path)
  write_gguf(path, "gpt-2", ggml__model="llama")
  with pytest.raises(ValueError, match=r"of the kind 'llama'.*tokenizer\.json"):
    load_tokenizer(path)
  values = gguf_files.byte_level_vocabulary("gpt-2", [], SPECIAL)  # the writer leaves empty lists out
  gguf_files.save(path, {"general.architecture": "llama"} | values, {"x": np.ones((2, 2), np.float32)})
  with pytest.raises(ValueError, match=r"no metadata 'tokenizer\.ggml\.merges'"):
    load_tokenizer(path)
  gguf_files.save(path, {"general.architecture": "llama"}, {"x": np.ones((2, 2), np.float32)})
  with pytest.raises(ValueError, match="of the kind None"):
    load_tokenizer(path)
  with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
    load_tokenizer(tmp_path)
  (tmp_path / "tokenizer.json").write_text("{}")
  with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer"):
    load_tokenizer(tmp_path)

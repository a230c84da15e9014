"""Text to token ids and back, and chat messages to ids.

Through the `tokenizers` package, from a directory's tokenizer.json or rebuilt from a GGUF file's metadata. The package
does the work; here its parts are put together, and chat templates are rendered in jinja2's sandbox, since a template is
a program from the same place as the weights.
"""

import dataclasses
import datetime
import json
import operator
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox
import numpy as np
import tokenizers
from gguf import TokenType
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from specjax.models.gguf import real_tokens
from specjax.models.gguf_file import open_file
from specjax.models.load import resolve

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GGUF_SPECIAL_IDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_GGUF_STOP_IDS = ("eos", "eot", "eom")

# Apart from how many digits make one piece, llama 3 and qwen 2 cut text alike.
_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """Encodes and decodes text; `load_tokenizer` makes one.

  vocab_size: the largest id plus one. An embedding may have more rows than that, as padding.
  eos_ids: the ids that end a text or a turn.
  chat_template: the jinja source, or None.
  special_tokens: e.g. "bos_token" -> "<s>", for the chat template.
  """

  source: pathlib.Path
  vocab_size: int
  eos_ids: tuple[int, ...]
  chat_template: str | None = dataclasses.field(repr=False)
  special_tokens: Mapping[str, str] = dataclasses.field(repr=False)
  backend: tokenizers.Tokenizer = dataclasses.field(repr=False)

  def encode(self, text: str) -> list[int]:
    """The ids of `text`. Special tokens in it are recognised; what the model wants around every text is added."""
    return self.backend.encode(text).ids

  def decode(self, ids: Iterable[int]) -> str:
    """The text of `ids`, special tokens included. An id that stands for no token is left out.

    Raises ValueError for a negative id, and TypeError for what is no integer.
    """
    numbers = [operator.index(i) for i in np.asarray(ids).tolist()]
    if numbers and min(numbers) < 0:
      raise ValueError(f"Token ids are not negative, got {min(numbers)}.")
    return self.backend.decode(numbers, skip_special_tokens=False)

  def chat(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> list[int]:
    """The ids of a conversation, as the model was taught to read one.

    messages: each with "role" ("system", "user", "assistant") and "content".
    add_generation_prompt: whether the beginning of the assistant's next turn is added.

    Raises ValueError if the model has no chat template, or if its template refuses the messages.
    """
    text = self._render(messages, add_generation_prompt)
    return self.backend.encode(text, add_special_tokens=False).ids  # the template has written them already

  def _render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
    if self.chat_template is None:
      raise ValueError(f"{self.source} has no chat template: encode the text itself.")
    for message in messages:
      if not isinstance(message, Mapping) or "role" not in message:
        raise ValueError(f"A chat message is a dict with 'role' and 'content', got {message!r}.")
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    try:
      return environment.from_string(self.chat_template).render(
        messages=messages,
        add_generation_prompt=add_generation_prompt,
        tools=None,
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        **self.special_tokens,
      )
    except jinja2.TemplateError as error:
      raise ValueError(f"The chat template of {self.source} failed on these messages: {error}") from error


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> Tokenizer:
  """The tokenizer of a model: by the same names and paths that `load_model` takes.

  Raises:
    FileNotFoundError: no such name or path, or a directory without tokenizer.json.
    ValueError: a GGUF file without a tokenizer, or with one of a kind that is not supported.
  """
  path = resolve(name_or_path, weights=False)
  return _from_directory(path) if path.is_dir() else _from_gguf(path)


def _from_directory(directory: pathlib.Path) -> Tokenizer:
  path = directory / "tokenizer.json"
  if not path.is_file():
    raise FileNotFoundError(f"{directory} has no tokenizer.json.")
  try:
    backend = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # the package raises nothing narrower
    raise ValueError(f"{path} is no tokenizer that the tokenizers package can read: {error}") from error
  backend.no_truncation()
  backend.no_padding()
  settings = _read_json(directory / "tokenizer_config.json")
  special = {name: _content(settings[name]) for name in _SPECIAL_NAMES if settings.get(name)}
  stops = [_read_json(directory / name).get("eos_token_id") for name in ("generation_config.json", "config.json")]
  stops += [backend.token_to_id(special["eos_token"])] if "eos_token" in special else []
  template = directory / "chat_template.jinja"
  return Tokenizer(
    source=directory,
    vocab_size=_vocab_size(backend),
    eos_ids=_unique(i for stop in stops for i in (stop if isinstance(stop, list) else [stop])),
    chat_template=template.read_text(encoding="utf-8") if template.is_file() else _default_template(settings),
    special_tokens=special,
    backend=backend,
  )


def _from_gguf(path: pathlib.Path) -> Tokenizer:
  metadata = open_file(path).metadata
  kind = metadata.get("tokenizer.ggml.model")
  if kind != "gpt2":
    raise ValueError(
      f"{path} has a tokenizer of the kind {kind!r}. Only byte-level BPE ('gpt2') can be rebuilt from GGUF metadata: "
      "use the model's Hugging Face directory with its tokenizer.json instead."
    )
  pre = metadata.get("tokenizer.ggml.pre")
  if pre not in _PRE_TOKENIZERS:
    raise ValueError(
      f"{path} has the pre-tokenizer {pre!r}, which is not supported. Supported are {', '.join(_PRE_TOKENIZERS)}."
    )
  if absent := [key for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges") if key not in metadata]:
    raise ValueError(f"{path} has no metadata {absent[0]!r}, which its tokenizer needs.")
  tokens = real_tokens(metadata["tokenizer.ggml.tokens"])
  backend = _byte_level_bpe(tokens, metadata, pre)
  ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _GGUF_SPECIAL_IDS.items()}
  return Tokenizer(
    source=path,
    vocab_size=_vocab_size(backend),
    eos_ids=_unique(metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _GGUF_STOP_IDS),
    chat_template=metadata.get("tokenizer.chat_template"),
    special_tokens={name: tokens[i] for name, i in ids.items() if i in tokens},
    backend=backend,
  )


def _byte_level_bpe(tokens: Mapping[int, str], metadata: Mapping[str, Any], pre: str) -> tokenizers.Tokenizer:
  is_llama = pre in _LLAMA
  merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
  vocab = {token: i for i, token in tokens.items()}
  # Llama 3 takes a piece that is a token as that token, even where no merges lead to it.
  backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=is_llama))
  backend.pre_tokenizer = _PRE_TOKENIZERS[pre]
  backend.decoder = decoders.ByteLevel()
  if pre in _QWEN:
    backend.normalizer = normalizers.NFC()
  backend.add_tokens(
    [
      tokenizers.AddedToken(tokens[i], special=kind != TokenType.USER_DEFINED, normalized=False)
      for i, kind in enumerate(metadata.get("tokenizer.ggml.token_type", ()))
      if kind in (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN) and i in tokens
    ]
  )
  # Older files of Llama 3 do not say that it wants a beginning-of-text token.
  around = {"bos": metadata.get("tokenizer.ggml.add_bos_token", is_llama)}
  around["eos"] = metadata.get("tokenizer.ggml.add_eos_token", False)
  added = {key: tokens[metadata[f"tokenizer.ggml.{key}_token_id"]] for key, wanted in around.items() if wanted}
  if added:
    backend.post_processor = processors.TemplateProcessing(
      single=[*([added["bos"]] if "bos" in added else []), "$A", *([added["eos"]] if "eos" in added else [])],
      special_tokens=[(token, vocab[token]) for token in added.values()],
    )
  return backend


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
  return pre_tokenizers.Sequence(
    [
      pre_tokenizers.Split(tokenizers.Regex(_SPLIT % digits), "isolated"),
      pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )


_LLAMA = ("llama-bpe", "llama3", "llama-v3")
_QWEN = ("qwen2", "deepseek-r1-qwen")
_PRE_TOKENIZERS = {
  "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
  "smollm": pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
  ),
  **dict.fromkeys(_QWEN, _split(r"\p{N}")),
  **dict.fromkeys(_LLAMA, _split(r"\p{N}{1,3}")),
}


def _vocab_size(backend: tokenizers.Tokenizer) -> int:
  return max(backend.get_vocab(with_added_tokens=True).values()) + 1


def _unique(ids: Iterable[int | None]) -> tuple[int, ...]:
  return tuple(dict.fromkeys(i for i in ids if i is not None))


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  """A directory's optional settings: empty where there is no such file."""
  return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _content(token: str | Mapping[str, Any]) -> str:
  return token if isinstance(token, str) else token["content"]


def _default_template(settings: Mapping[str, Any]) -> str | None:
  template = settings.get("chat_template")
  if isinstance(template, list):  # several, by name
    return {entry["name"]: entry["template"] for entry in template}.get("default")
  return template


def _to_json(value: Any, indent: int | None = None) -> str:
  """jinja2's own filter escapes for HTML."""
  return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
  return datetime.datetime.now().strftime(format)

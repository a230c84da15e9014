"""Acceptance rules, by name. Every rule that has one is lossless; `lenient(l)` makes one that is not."""

from typing import get_args

from specjax.verify.base import Noise, Verdict, Verifier, declare, shares_noise
from specjax.verify.block import block
from specjax.verify.coupled import coupled
from specjax.verify.lenient import lenient
from specjax.verify.match import match
from specjax.verify.token import token

RULES: dict[str, Verifier] = {"token": token, "block": block, "coupled": coupled, "match": match}

__all__ = [
  "RULES",
  "Verdict",
  "Verifier",
  "block",
  "coupled",
  "declare",
  "get",
  "lenient",
  "match",
  "shares_noise",
  "token",
]


def get(verifier: str | Verifier) -> Verifier:
  """The rule of that name, or the function itself.

  Raises ValueError for an unknown name and TypeError for a function that does not declare whether it is lossless.
  """
  if isinstance(verifier, str):
    if verifier.startswith("lenient"):
      raise ValueError(f"verifier={verifier!r} has no name, as it is not lossless: pass specjax.verify.lenient(l).")
    if verifier not in RULES:
      raise ValueError(f"verifier={verifier!r} is unknown. Known: {', '.join(sorted(RULES))}; or pass a function.")
    return RULES[verifier]
  if verifier is lenient:
    raise TypeError("verifier=lenient makes rules and is none: pass specjax.verify.lenient(l), l in (0, 1].")
  if not callable(verifier) or not isinstance(getattr(verifier, "lossless", None), bool):
    raise TypeError(
      f"verifier={verifier!r} must be a name or a function with a bool attribute `lossless`: "
      "decorate it with specjax.verify.declare(lossless=...)."
    )
  if getattr(verifier, "noise", "round") not in get_args(Noise):
    raise TypeError(f'verifier={verifier!r} has noise={verifier.noise!r}; it must be "round" or "position".')
  return verifier

"""Acceptance rules, by name."""

from specjax.verify.base import Verdict, Verifier, declare
from specjax.verify.token import token

RULES: dict[str, Verifier] = {"token": token}

__all__ = ["RULES", "Verdict", "Verifier", "declare", "get", "token"]


def get(verifier: str | Verifier) -> Verifier:
  """The rule of that name, or the function itself.

  Raises ValueError for an unknown name and TypeError for a function that does not declare whether it is lossless.
  """
  if isinstance(verifier, str):
    if verifier not in RULES:
      raise ValueError(f"verifier={verifier!r} is unknown. Known: {', '.join(sorted(RULES))}; or pass a function.")
    return RULES[verifier]
  if not callable(verifier) or not isinstance(getattr(verifier, "lossless", None), bool):
    raise TypeError(
      f"verifier={verifier!r} must be a name or a function with a bool attribute `lossless`: "
      "decorate it with specjax.verify.declare(lossless=...)."
    )
  return verifier

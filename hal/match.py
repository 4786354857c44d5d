"""Does a claim cover a specification? The answer is a list of refusals, never a boolean."""

from __future__ import annotations

import logging
from typing import Any

from hal.types import Claim, DType, OpSpec, Refusal, RefusalCode

log = logging.getLogger("hal.match")
DETERMINISM = ("none", "run", "batch")

# Which refusal code a field's mismatch gets. The owner of the vocabulary fills it; the kind of the value decides for
# the rest, because ``hal`` itself knows no field.
FIELD_CODES: dict[str, RefusalCode] = {}


def refusals(claim: Claim, spec: OpSpec) -> list[Refusal]:
    """Return every reason why the claim does not cover the specification; empty when it does."""
    found = _contract(claim, spec)
    for name, value in spec.fields.items():
        if name == "determinism":  # declared by the claim itself, not among its needs
            found += _determinism(claim, value)
            continue
        need = claim.needs.get(name)
        if need is None:
            found.append(
                Refusal(claim.kernel, _code(name, value), name, "not used", show(value), "the claim does not name it")
            )
            continue
        try:
            fits = need.admits(value)
        except Exception as error:  # a predicate that raises refuses; it never aborts the choice
            found.append(_raised(claim, name, need, error))
            continue
        if not fits:
            found.append(_mismatch(claim, name, need, value))
    if not found and claim.refuse is not None:
        found += _predicate(claim, spec)
    return found


def _contract(claim: Claim, spec: OpSpec) -> list[Refusal]:
    if claim.contract[0] == spec.contract[0]:
        return []
    ours, theirs = ("{}.{}".format(*version) for version in (spec.contract, claim.contract))
    return [Refusal(claim.kernel, RefusalCode.contract, "contract", ours, theirs)]


def _determinism(claim: Claim, wanted: str) -> list[Refusal]:
    if DETERMINISM.index(claim.determinism) >= DETERMINISM.index(wanted):
        return []
    return [
        Refusal(claim.kernel, RefusalCode.feature, "determinism", f"declared {wanted}", f"declared {claim.determinism}")
    ]


def _mismatch(claim: Claim, name: str, need: Any, value: Any) -> Refusal:
    allowed = getattr(need, "allowed", None)
    if allowed is not None:  # name only the flags that are too many
        value = frozenset(value) - frozenset(allowed)
    # The bare constraint ("one of float32") reads as what the kernel can do; the value is what was asked.
    return Refusal(claim.kernel, _code(name, value), name, str(need), show(value))


def _predicate(claim: Claim, spec: OpSpec) -> list[Refusal]:
    assert claim.refuse is not None
    try:
        found = list(claim.refuse(spec))
        return [one if isinstance(one, Refusal) else _vague(claim, one) for one in found]
    except Exception as error:
        return [_raised(claim, "refuse", "a predicate that answers", error)]


def _vague(claim: Claim, answer: Any) -> Refusal:
    return Refusal(claim.kernel, RefusalCode.feature, "refuse", "what the predicate admits", str(answer))


def _raised(claim: Claim, field: str, required: Any, error: Exception) -> Refusal:
    log.warning("the predicate of %s for %s raised %s: %s", claim.kernel, field, type(error).__name__, error)
    return Refusal(claim.kernel, RefusalCode.resource, field, str(required), f"raised {type(error).__name__}: {error}")


def _code(name: str, value: Any) -> RefusalCode:
    if name in FIELD_CODES:
        return FIELD_CODES[name]
    if isinstance(value, DType):
        return RefusalCode.dtype
    if isinstance(value, int) and not isinstance(value, bool):
        return RefusalCode.shape
    return RefusalCode.feature


def show(value: Any) -> str:
    """Write a field's value for people.

    >>> show(frozenset({"b", "a"}))
    'a, b'
    """
    return ", ".join(sorted(map(str, value))) if isinstance(value, frozenset | set) else str(value)

"""What a claim says about one field of a specification: a set, a range, a multiple, flags."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Protocol


class Constraint(Protocol):
    """Anything that can judge a value and say in words what it wants."""

    def admits(self, value: Any) -> bool: ...


@dataclass(frozen=True)
class OneOf:
    """The value is one of those listed.

    >>> OneOf({"NHD", "HND"}).admits("NHD"), str(OneOf({2, 1}))
    (True, 'one of 1, 2')
    """

    values: Set[Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", frozenset(self.values))

    def admits(self, value: Any) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return "one of " + ", ".join(sorted(map(str, self.values)))


@dataclass(frozen=True)
class Range:
    """``low <= value <= high``; None leaves a side open.

    >>> Range(1, 256).admits(512), str(Range(1, None))
    (False, 'at least 1')
    """

    low: Any
    high: Any

    def admits(self, value: Any) -> bool:
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)

    def __str__(self) -> str:
        if self.high is None:
            return f"at least {self.low}"
        return f"at most {self.high}" if self.low is None else f"{self.low} to {self.high}"


@dataclass(frozen=True)
class MultipleOf:
    """The value is a multiple of ``n``.

    >>> MultipleOf(8).admits(20)
    False
    """

    n: int

    def admits(self, value: Any) -> bool:
        return bool(value % self.n == 0)

    def __str__(self) -> str:
        return f"a multiple of {self.n}"


@dataclass(frozen=True)
class Flags:
    """The value is a set of flags, all of them allowed.

    >>> Flags({"lse", "softcap"}).admits(frozenset({"sinks"}))
    False
    """

    allowed: Set[str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "allowed", frozenset(self.allowed))

    def admits(self, value: Any) -> bool:
        return frozenset(self.allowed).issuperset(value)

    def __str__(self) -> str:
        return "at most the flags " + (", ".join(sorted(self.allowed)) or "(none)")

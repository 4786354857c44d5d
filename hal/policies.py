"""What the operator wants: pins, preferences, denials, strictness. Process-wide, newest first."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from hal import config, generation
from hal.errors import ContractError


@dataclass(frozen=True)
class Policy:
    """One complete policy. Patterns are shell patterns over kernel, plugin and device names."""

    pin: Mapping[str, str] = field(default_factory=dict)
    prefer: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    strict: bool = False
    allow_cpu_fallback: bool = False

    def denial(self, *names: str) -> str | None:
        """Return the pattern that denies any of the names."""
        return next((pattern for pattern in self.deny if matches(pattern, *names)), None)

    def preference(self, *names: str) -> int:
        """Return the place of the first preference that any of the names meets; the last place when none does."""
        for place, pattern in enumerate(self.prefer):
            if matches(pattern, *names):
                return place
        return len(self.prefer)


def matches(pattern: str, *names: str) -> bool:
    """Whether a shell pattern meets any of the names.

    >>> matches("torch.*", "torch.gemm", "cpu:0")
    True
    """
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


_changes: list[dict[str, object]] = []  # innermost last; each entry holds what one ``policy(...)`` block changed


def current() -> Policy:
    """Return the policy in force: the settings of the process, then every open ``policy`` block."""
    settings = config.load()
    result = Policy(dict(settings.pin), settings.prefer, settings.deny, settings.strict, settings.allow_cpu_fallback)
    for change in tuple(_changes):
        result = replace(
            result,
            pin={**result.pin, **change["pin"]},  # type: ignore[dict-item]
            prefer=(*change["prefer"], *result.prefer),  # type: ignore[misc]
            deny=(*change["deny"], *result.deny),  # type: ignore[misc]
            strict=result.strict if change["strict"] is None else bool(change["strict"]),
            allow_cpu_fallback=result.allow_cpu_fallback
            if change["allow_cpu_fallback"] is None
            else bool(change["allow_cpu_fallback"]),
        )
    return result


@contextmanager
def policy(
    *,
    pin: Mapping[str, str] | None = None,
    prefer: Sequence[str] = (),
    deny: Sequence[str] = (),
    strict: bool | None = None,
    allow_cpu_fallback: bool | None = None,
) -> Iterator[None]:
    """Change the policy while the block runs; whatever is bound is chosen anew on entry and exit.

    The policy belongs to the process, not to the thread: a ``Bound`` is shared by threads.

    Args:
        pin: operator name -> kernel pattern; no other kernel may serve the operator.
        prefer: kernel patterns, best first.
        deny: kernel, plugin or device patterns that must not be used.
        strict: admit only kernels with valid evidence for this device.
        allow_cpu_fallback: let ``cpu:0`` serve a host-visible device that has no fitting kernel.

    Raises:
        ContractError: a value of the wrong kind.
    """
    for name, patterns in (("prefer", prefer), ("deny", deny)):
        if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ContractError(name, "a sequence of patterns", repr(patterns))
    if pin is not None and not (
        isinstance(pin, Mapping) and all(isinstance(text, str) for pair in pin.items() for text in pair)
    ):
        raise ContractError("pin", "a mapping from operator to kernel pattern", repr(pin))
    for name, switch in (("strict", strict), ("allow_cpu_fallback", allow_cpu_fallback)):
        if switch is not None and type(switch) is not bool:
            raise ContractError(name, "True, False or None", repr(switch))
    change: dict[str, object] = {
        "pin": dict(pin or {}),
        "prefer": tuple(prefer),
        "deny": tuple(deny),
        "strict": strict,
        "allow_cpu_fallback": allow_cpu_fallback,
    }
    try:
        with generation.lock:
            _changes.append(change)
            generation.bump()
        yield
    finally:
        with generation.lock:
            # Blocks of several threads may close in any order: remove this very one.
            _changes[:] = [other for other in _changes if other is not change]
            generation.bump()

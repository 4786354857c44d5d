"""The generation counter: it moves when plugins, policy or health change, and tells who cached a choice."""

from __future__ import annotations

import threading
from collections.abc import Callable

# One lock for every change of plugins, policy, health and bindings. Changes are rare; calls take no lock.
lock = threading.RLock()
_current = 0
_listeners: list[Callable[[], None]] = []


def current() -> int:
    """Return the number of changes so far."""
    return _current


def on_change(listener: Callable[[], None]) -> None:
    """Call ``listener`` after every change, in the order of registration."""
    _listeners.append(listener)


def bump() -> None:
    """Announce a change."""
    global _current
    with lock:
        _current += 1
        for listener in _listeners:
            listener()

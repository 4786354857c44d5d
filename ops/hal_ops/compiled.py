"""Whether the caller is being compiled, and where the function forms then go.

``hal_ops.torch_ops`` fills the two names when it is imported. Without it nothing here costs more
than a call of a lambda, and torch is not needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _never() -> bool:
    return False


active: Callable[[], bool] = _never
ops: Any = None  # the module hal_ops.torch_ops

"""The call path of function forms: one dictionary look-up, then the bound kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import hal
from hal import binding, generation, health, placement, registry
from hal.errors import ContractError, HalError, UnsupportedError
from hal.types import Bound, Explanation, OpSpec
from hal_ops import arrays

LIMIT = 4096  # signatures kept per operator; a program that has more is not repeating itself


class Route:
    """Where calls of one signature go: the slot, its device, and how to make arrays native (None: they are)."""

    __slots__ = ("bound", "device", "facts", "generation", "wrap")

    def __init__(
        self, bound: Bound, device: str, wrap: Callable[[Any], Any] | None, facts: Any, generation: int
    ) -> None:
        self.bound = bound
        self.device = device
        self.wrap = wrap
        self.facts = facts
        self.generation = generation  # of the world that the route was made in

    def native(self, *values: Any) -> tuple[Any, ...]:
        """Return arrays as the kernel takes them."""
        wrap = self.wrap
        return values if wrap is None else tuple(None if x is None else wrap(x) for x in values)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the kernel; let the next candidate serve where it refuses before any side effect."""
        while True:
            record = self.bound.record
            try:
                return self.bound.fn(*args, **kwargs)
            except HalError as error:
                self.recover(record, error)

    def recover(self, record: Explanation, error: HalError) -> None:
        """Remember a failure against the kernel of ``record``; raise it again unless the slot now holds another one."""
        with generation.lock:  # a change in progress finishes first
            if record.chosen is None:
                raise error
            if self.bound.record is not record:  # the slot changed during the call, so nobody knows whose failure it is
                retry = isinstance(error, UnsupportedError)
            else:
                retry = health.observe(record.evidence["device"], record.chosen, record.requested, error)
        if not retry:
            raise error


class Table:
    """Signature -> route, for one operator. Readers take no lock; a change of the world empties it."""

    def __init__(self) -> None:
        self._routes: dict[Hashable, Route] = {}
        generation.on_change(self._clear)

    def get(self, key: Hashable) -> Route | None:
        """Return the route of a signature; an asynchronous error of its device is raised here, before the call."""
        try:
            found = self._routes.get(key)
        except TypeError:  # an argument that cannot be hashed: validation will say what is wrong with it
            return None
        if found is not None and health._pending:
            health.raise_pending(found.device)
        return found

    def add(self, key: Hashable, route: Route) -> Route:
        with generation.lock:
            if route.generation == generation.current():  # else the world that it was made in is gone
                kept = self._routes if len(self._routes) < LIMIT else {}
                self._routes = {**kept, key: route}  # copy on write
        return route

    def _clear(self) -> None:
        self._routes = {}


def route(spec: OpSpec, sample: Any, device: Any, facts: Any = None, *others: Any) -> Route:
    """Bind a specification for the device that an array (or ``device=``) names.

    Args:
        sample: the array whose own device decides where nothing else does.
        facts: what the operator wants to remember with the route.
        others: further arrays, to learn whether the kernel takes this kind as it is.

    Raises:
        ContractError: unknown device, or one that cannot reach the array's memory.
        UnsupportedError: no kernel fits.
    """
    started = generation.current()
    target = registry.resolve(placement.place(sample, device))
    if target.available:
        reachable(sample, target)
    health.raise_pending(target.id)
    bound = binding.lookup(spec, target.id)
    memory = registry.find_memory(target.id)
    present = [x for x in (sample, *others) if x is not None]
    wrap = None if memory is None or all(memory.wrap(x) is x for x in present) else memory.wrap
    return Route(bound, target.id, wrap, facts, started)


def checked(op: str, check: Callable[..., OpSpec]) -> None:
    """Make ``hal.bind(..., check=...)`` validate the calls of an operator's bound form.

    ``check(spec, level, *arguments)`` takes the arguments of the bound form, raises ``ContractError``,
    and returns the specification that the call amounts to; that must lie within the one bound for.
    """

    def wrap(bound_for: OpSpec, device: str, fn: Callable[..., Any], level: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            _within(bound_for, check(bound_for, level, *args, **kwargs))
            return fn(*args, **kwargs)

        return run

    binding.WRAPPERS[op] = wrap


def _within(bound_for: OpSpec, call: OpSpec) -> None:
    """Check that a call asks for nothing that the kernel was not chosen for. Sizes that vary by step are free."""
    extra = call.fields.get("features", frozenset()) - bound_for.fields.get("features", frozenset())
    if extra:
        raise ContractError(
            "features", f"what the kernel was bound for, {bound_for}", "also " + ", ".join(sorted(extra))
        )
    for name, value in bound_for.fields.items():
        if name not in _FREE and call.fields.get(name) != value:
            raise ContractError(name, f"{value}, as bound", f"{call.fields.get(name)}")


_FREE = {"features", "m", "max_q", "max_kv", "batch", "table", "kv_slack", "determinism"}


def reachable(sample: Any, target: hal.Device) -> None:
    """Refuse a device that cannot work on the array where it lies: nothing is staged behind the caller's back."""
    described = arrays.meta("x", sample)
    if described.device == "host":
        fits = "host_visible" in target.features or target.tensor_device == "cpu"
    elif isinstance(sample, hal.Array):
        fits = sample.device == target.id
    else:
        fits = str(described.device).removesuffix(":0") == str(target.tensor_device).removesuffix(":0")
    if not fits:
        raise ContractError("device", f"a device that reaches memory of {described.device}", target.id)


def default_device() -> str | None:
    """Return the device that ``hal.use`` set for this thread or task, part of every signature."""
    return placement._default.get()

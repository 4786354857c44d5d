"""Choosing a kernel: every candidate is judged once, the survivors are ranked, the winner is built."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Any, Literal

from hal import evidence, generation, health, match, policies, registry
from hal.array import Array
from hal.errors import ContractError, HalError, OutOfMemory, TransientError, UnsupportedError
from hal.types import Bound, Device, Explanation, Kernel, OpSpec, Refusal, RefusalCode

log = logging.getLogger("hal.binding")
Check = Literal["none", "meta", "full"]
FALLBACK = "cpu:0"

# op -> wrap(spec, device id, fn, level): validates, then calls fn. The owner of the operators fills it.
WRAPPERS: dict[str, Callable[[OpSpec, str, Callable[..., Any], str], Callable[..., Any]]] = {}
# op -> places of the arguments of its bound form that stay host arrays on every device. Filled likewise.
ON_HOST: dict[str, frozenset[int]] = {}

_bounds: weakref.WeakKeyDictionary[Bound, _Request] = weakref.WeakKeyDictionary()
_built: dict[tuple[str, str, OpSpec], _Built] = {}
_lookup: dict[tuple[OpSpec, str], Bound] = {}


@dataclass(frozen=True)
class _Request:
    spec: OpSpec
    device: str
    check: Check


@dataclass(frozen=True)
class _Built:
    """What ``Kernel.build`` made, or why it did not: a build that failed is not tried again at every change."""

    kernel: Kernel
    fn: Callable[..., Any] | None
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True)
class _Choice:
    kernel: Kernel
    fn: Callable[..., Any]
    record: Explanation


def bind(spec: OpSpec, device: str | Device, *, check: Check = "none") -> Bound:
    """Choose the kernel for a specification on a device.

    Args:
        spec: made by ``hal_ops.spec``.
        device: device or id; nothing else is tried unless the policy allows the CPU as fallback.
        check: "meta" or "full" validate the arguments of every call of ``fn``.

    Raises:
        UnsupportedError: nothing fits; ``refusals`` has the reason of every kernel.
        ContractError: unknown device or check level.

    >>> import hal_ops
    >>> bind(hal_ops.spec("silu_mul", dtype="fp32", dim=64), "cpu:0").kernel
    'torch.silu_mul'
    """
    if check not in ("none", "meta", "full"):
        raise ContractError("check", "none, meta or full", repr(check))
    _check_spec(spec)
    request = _Request(spec, registry.resolve(device).id, check)
    with generation.lock:
        choice = _choose(spec, request.device)
        bound = Bound(_wrapped(request, choice.fn), choice.kernel.claim.kernel, choice.record)
        _bounds[bound] = request
        return bound


def _check_spec(spec: Any) -> None:
    if not isinstance(spec, OpSpec):
        raise ContractError("spec", "an OpSpec (see hal_ops.spec)", repr(spec))


def lookup(spec: OpSpec, device: str) -> Bound:
    """Return the shared slot of function forms for (spec, device id); the lock is taken on a miss only."""
    found = _lookup.get((spec, device))
    if found is None:
        bound = bind(spec, device)
        with generation.lock:
            found = _publish((spec, device), bound)
    return found


def _publish(key: tuple[OpSpec, str], bound: Bound) -> Bound:
    global _lookup
    if key not in _lookup:
        _lookup = {**_lookup, key: bound}  # copy on write: readers never see a dict being changed
    return _lookup[key]


def explain(spec: OpSpec, device: str | Device | None = None) -> Explanation:
    """Tell which kernel would serve a specification and why each other one would not.

    Without ``device`` the candidates of every device are judged and the record names the first
    device, in order of id, that has a kernel.

    Raises:
        ContractError: unknown device, or no ``OpSpec``.
    """
    _check_spec(spec)
    if device is not None:
        return _explain(spec, registry.resolve(device).id)
    records = [_explain(spec, found.id) for found in registry.devices(all=True)]
    refusals = tuple(refusal for record in records for refusal in record.refusals)
    chosen = next((record for record in records if record.chosen), None)
    if chosen is None:
        return Explanation(spec, None, refusals, {}, generation.current())
    return Explanation(spec, chosen.chosen, refusals, chosen.evidence, generation.current())


def _explain(spec: OpSpec, device: str) -> Explanation:
    with generation.lock:
        try:
            return _choose(spec, device).record
        except UnsupportedError as error:
            return Explanation(spec, None, error.refusals, {"device": device}, generation.current())


def _choose(spec: OpSpec, device_id: str) -> _Choice:
    device = registry.device(device_id)
    policy = policies.current()
    refusals: list[Refusal] = []
    survivors: list[Kernel] = []
    candidates = [kernel for kernel in registry.kernels(device_id) if kernel.claim.op == spec.op]
    for kernel in candidates:
        reasons = _judge(kernel, spec, device, policy)
        refusals += reasons
        if not reasons:
            survivors.append(kernel)
    survivors.sort(key=lambda kernel: _rank(kernel, spec, device, policy))
    for place, kernel in enumerate(survivors):
        built = _build(kernel, spec, device_id)
        refusals += built.refusals
        if built.fn is None:
            continue
        winner = kernel.claim
        refusals += [_outranked(other, winner.kernel, spec, device, policy) for other in survivors[place + 1 :]]
        _warn_if_second_choice(candidates, kernel, spec, device, policy)
        return _Choice(kernel, built.fn, _record(spec, winner.kernel, refusals, device))
    return _fallback_or_raise(spec, device, policy, refusals)


def _judge(kernel: Kernel, spec: OpSpec, device: Device, policy: policies.Policy) -> list[Refusal]:
    claim = kernel.claim
    name = claim.kernel
    if not device.available:
        return [Refusal(name, RefusalCode.device, "device", f"{device.id} available", device.reason or "not available")]
    found = match.refusals(claim, spec)
    found += health.refusals(device.id, name, spec)
    pattern = policy.denial(name, device.plugin, device.id)
    if pattern is not None:
        found.append(Refusal(name, RefusalCode.policy, "deny", "not denied", f"denied by the pattern {pattern!r}"))
    pin = policy.pin.get(spec.op)
    if pin is not None and not policies.matches(pin, name):
        found.append(Refusal(name, RefusalCode.policy, "pin", f"the pinned kernel {pin}", name))
    if policy.strict:
        found += _strict(claim.op, name, device)
    return found


def _strict(op: str, kernel: str, device: Device) -> list[Refusal]:
    record = evidence.find(device, op, kernel)
    actual = "none recorded" if record is None else record.why_invalid(device)
    if actual is None:
        return []
    hint = "strict mode admits certified kernels only"
    return [Refusal(kernel, RefusalCode.evidence, "evidence", "valid evidence for this device", actual, hint)]


def _rank(kernel: Kernel, spec: OpSpec, device: Device, policy: policies.Policy) -> tuple[Any, ...]:
    """Order of the survivors: preference, valid evidence, measured latency, declared priority, name.

    A pin needs no place here: it has refused every other kernel.
    """
    claim = kernel.claim
    record = evidence.find(device, spec.op, claim.kernel)
    valid = record is not None and record.why_invalid(device) is None
    measured = evidence.latency(record, spec) if valid else float("inf")
    return policy.preference(claim.kernel), not valid, measured, -claim.priority, claim.kernel


def _outranked(other: Kernel, winner: str, spec: OpSpec, device: Device, policy: policies.Policy) -> Refusal:
    place = _rank(other, spec, device, policy)
    actual = f"fits, but ranks lower (priority {-place[3]})"
    return Refusal(other.claim.kernel, RefusalCode.policy, "rank", f"to rank before {winner}", actual)


def _warn_if_second_choice(
    candidates: list[Kernel], winner: Kernel, spec: OpSpec, device: Device, policy: policies.Policy
) -> None:
    best = min((policy.preference(kernel.claim.kernel) for kernel in candidates), default=len(policy.prefer))
    if policy.preference(winner.claim.kernel) > best:
        log.warning(
            "%s on %s: %s serves, not the preferred %s", spec.op, device.id, winner.claim.kernel, policy.prefer[best]
        )
    log.debug("%s on %s -> %s", spec, device.id, winner.claim.kernel)


def _build(kernel: Kernel, spec: OpSpec, device: str) -> _Built:
    """Build once per kernel and specification.

    Raises:
        OutOfMemory, TransientError: these say nothing about the kernel, so nothing is remembered.
    """
    key = (device, kernel.claim.kernel, spec)
    found = _built.get(key)
    if found is None or found.kernel is not kernel:  # a plugin that came back under the same name is another kernel
        try:
            found = _Built(kernel, kernel.build(spec))
        except (OutOfMemory, TransientError):
            raise
        except Exception as error:  # whatever else a build raises, the next candidate gets its turn
            log.warning("%s does not build for %s: %s", kernel.claim.kernel, spec, error)
            found = _Built(kernel, None, tuple(health.build_refusals(kernel.claim.kernel, error)))
        _built[key] = found
    return found


def _record(spec: OpSpec, chosen: str, refusals: list[Refusal], device: Device) -> Explanation:
    record = evidence.find(device, spec.op, chosen)
    facts: dict[str, Any] = {
        "device": device.id,
        "class": device.evidence,
        "sku": device.sku,
        "driver": device.driver,
        "runtime": device.runtime,
        "certified": record is not None and record.why_invalid(device) is None,
    }
    if record is not None:
        facts |= {"suite": record.suite, "result_hash": record.result_hash, "invalid": record.why_invalid(device)}
    return Explanation(spec, chosen, tuple(refusals), facts, generation.current())


def _fallback_or_raise(spec: OpSpec, device: Device, policy: policies.Policy, refusals: list[Refusal]) -> _Choice:
    if not refusals:
        what = f"a kernel for {spec.op}"
        none = registry.problem(device.id) or f"the plugin {device.plugin} claims none"
        actual = none if device.available else device.reason or "not available"
        refusals = [Refusal(device.id, RefusalCode.device, "op", what, actual)]
    if _may_fall_back(device, policy):
        log.warning("%s: no kernel of %s fits; %s serves, as the policy allows", spec, device.id, FALLBACK)
        try:
            choice = _choose(spec, FALLBACK)
        except UnsupportedError as error:
            refusals += error.refusals
        else:
            record = choice.record
            merged = Explanation(spec, record.chosen, (*refusals, *record.refusals), record.evidence, record.generation)
            return _Choice(choice.kernel, _adapted(spec.op, choice.fn), merged)
    raise UnsupportedError(f"no kernel on {device.id} serves {spec}", refusals)


def _may_fall_back(device: Device, policy: policies.Policy) -> bool:
    allowed = policy.allow_cpu_fallback and device.id != FALLBACK and "host_visible" in device.features
    return allowed and any(other.id == FALLBACK for other in registry.devices(all=True))


def _adapted(op: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Make a kernel of the fallback device take the arrays that are native to the device the caller named."""
    memory = registry.find_memory(FALLBACK)
    if memory is None:
        return fn
    wrap, on_host = memory.wrap, ON_HOST.get(op, frozenset())

    def native(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(native, x))
        return wrap(x) if isinstance(x, Array) or hasattr(x, "__dlpack__") else x

    def adapted(*args: Any, **kwargs: Any) -> Any:
        positional = (x if place in on_host else native(x) for place, x in enumerate(args))
        return fn(*positional, **{name: native(x) for name, x in kwargs.items()})

    return adapted


def _wrapped(request: _Request, fn: Callable[..., Any]) -> Callable[..., Any]:
    if request.check == "none":
        return fn
    wrap = WRAPPERS.get(request.spec.op)
    if wrap is None:
        raise ContractError("check", f"none: {request.spec.op} has no validator", request.check)
    return wrap(request.spec, request.device, fn, request.check)


def _refresh() -> None:
    """Give every slot the kernel that wins now. Runs between calls: a call holds the callable it loaded."""
    _forget_gone()
    for bound, request in list(_bounds.items()):
        try:
            choice = _choose(request.spec, request.device)
        except HalError as error:
            refusals = error.refusals if isinstance(error, UnsupportedError) else ()
            bound.fn, bound.kernel = _raiser(error), ""
            bound.record = Explanation(request.spec, None, refusals, {"device": request.device}, generation.current())
            continue
        # The record comes last: who has read it before calling fn can tell afterwards whether fn was its own.
        bound.fn, bound.kernel = _wrapped(request, choice.fn), choice.kernel.claim.kernel
        bound.record = choice.record


def _forget_gone() -> None:
    """Drop the shared slots and built kernels of devices that left; slots that engines hold stay and may recover."""
    global _lookup
    if not _lookup and not _built:  # the plugins may not even have been asked for devices yet
        return
    known = {device.id for device in registry.devices(all=True)}
    _lookup = {key: bound for key, bound in _lookup.items() if key[1] in known}
    for key in [key for key in _built if key[0] not in known]:
        del _built[key]


def _raiser(error: HalError) -> Callable[..., Any]:
    if isinstance(error, ContractError):  # the device left with its plugin
        error = UnsupportedError(str(error))

    def unavailable(*args: Any, **kwargs: Any) -> Any:
        raise copy(error)  # an exception raised again and again keeps the frames of every time

    return unavailable


generation.on_change(_refresh)

"""What the runtime does about a failure, by its class."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_backend import SILU, Fake, codes, installed, kernel, manifest, raising, silu_mul

import hal
import hal_ops
from hal import health
from hal.errors import (
    CompileError,
    ContractError,
    DeviceLost,
    HalError,
    NumericError,
    OutOfMemory,
    TransientError,
    UnsupportedError,
)

X = np.array([[1.0, 2.0, -3.0, 0.5, 1.0, 2.0, 3.0, 4.0]], "float32")


def call(device: str = "fake:0") -> Any:
    return hal_ops.silu_mul(X, device=device)


def pair(error: BaseException) -> Fake:
    return Fake(kernels=[kernel("a.silu", run=raising(error), priority=9), kernel("b.silu")])


def test_unsupported_goes_to_the_next_candidate_and_is_remembered() -> None:
    own = hal.Refusal("a.silu", hal.RefusalCode.resource, "workspace", "less", "more")
    for error, code in ((UnsupportedError("not today"), "feature"), (UnsupportedError("no", [own]), "resource")):
        tried: list[int] = []

        def run(*args: Any, error: HalError = error, tried: list[int] = tried, **kwargs: Any) -> None:
            tried.append(1)
            raise error

        with installed(Fake(kernels=[kernel("a.silu", run=run, priority=9), kernel("b.silu")])) as fake:
            expected = call()
            assert np.array_equal(call(), expected) and len(tried) == 1
            record = hal.explain(SILU, fake.id)
            assert record.chosen == "b.silu" and codes(record) == {"a.silu": {code}}
            other = hal_ops.spec("silu_mul", dtype="float32", dim=8)
            assert hal.bind(other, fake.id).kernel == "a.silu", "other specifications are not concerned"


def test_unsupported_by_all_raises_every_reason() -> None:
    fake = Fake(kernels=[kernel(f"{n}.silu", run=raising(UnsupportedError(f"{n} cannot"))) for n in "abc"])
    with installed(fake):
        with pytest.raises(UnsupportedError) as caught:
            call()
        assert {refusal.kernel for refusal in caught.value.refusals} == {"a.silu", "b.silu", "c.silu"}
        with pytest.raises(UnsupportedError, match="b cannot"):
            call()


def test_demotions_leave_with_their_plugin() -> None:
    with installed(pair(UnsupportedError("not today"))) as fake:
        call()
        hal.unregister("fake")
        fake.kernels = [kernel("a.silu", priority=9), kernel("b.silu")]
        hal.register(fake, manifest())
        assert hal.bind(SILU, fake.id).kernel == "a.silu"


def test_device_lost_quarantines_the_device() -> None:
    with installed(pair(DeviceLost("fake:0", "fell off the bus")), Fake("spare")) as fake:
        bound = hal.bind(SILU, fake.id)
        with pytest.raises(DeviceLost):
            call()
        assert not hal.device("fake:0").available and "fell off the bus" in str(hal.device("fake:0").reason)
        assert "fake:0" not in {device.id for device in hal.devices()}
        for refused in (call, lambda: bound.fn(X, out=X)):
            with pytest.raises(UnsupportedError, match="fell off the bus"):
                refused()
        with pytest.raises(DeviceLost):
            hal.empty((1,), "float32", "fake:0")
        assert call("spare:0").shape == (1, 4)
        health.release("fake:0")
        assert hal.device("fake:0").available


def test_numeric_error_quarantines_the_kernel_on_that_device() -> None:
    with installed(pair(NumericError("non-finite canary")), Fake("spare", kernels=[kernel("a.silu")])):
        with pytest.raises(NumericError):
            call()
        record = hal.explain(SILU, "fake:0")
        assert record.chosen == "b.silu" and codes(record) == {"a.silu": {"quarantined"}}
        assert call().shape == (1, 4) and hal.bind(SILU, "spare:0").kernel == "a.silu"


@pytest.mark.parametrize(
    "error",
    [OutOfMemory("full"), TransientError("busy"), CompileError("late"), ContractError("x", "a", "b"), KeyError("k")],
)
def test_other_errors_are_raised_and_nothing_is_remembered(error: Exception) -> None:
    with installed(pair(error)) as fake:
        for _ in range(2):
            with pytest.raises(type(error)):
                call()
        assert hal.bind(SILU, fake.id).kernel == "a.silu" and hal.device(fake.id).available


def test_a_failure_is_blamed_on_the_kernel_that_ran() -> None:
    """The slot changes while the first kernel runs: its failure is not held against the second."""

    def run(*args: Any, **kwargs: Any) -> None:
        hal.quarantine("a.silu", reason="meanwhile")
        raise NumericError("wrong")

    with installed(Fake(kernels=[kernel("a.silu", run=run, priority=9), kernel("b.silu")])) as fake:
        with pytest.raises(NumericError):
            call()
        assert hal.bind(SILU, fake.id).kernel == "b.silu"


def test_a_failure_of_the_fallback_is_blamed_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hal.binding, "FALLBACK", "host:0")
    with installed(Fake(kernels=[]), Fake("host", kernels=pair(UnsupportedError("no")).kernels)):
        with hal.policy(allow_cpu_fallback=True):
            assert np.array_equal(call(), hal_ops.silu_mul(X, device="host:0"))
        assert hal.explain(SILU, "host:0").chosen == "b.silu"


def test_pending_errors_are_raised_once_by_the_next_call_or_by_check() -> None:
    ran: list[int] = []

    def run(x: Any, *, out: Any) -> None:
        ran.append(1)
        silu_mul(x, out=out)

    with installed(Fake(kernels=[kernel("a.silu", run=run)])) as fake:
        call()
        health.post(fake.id, ContractError("slots", "below 8", "9"))
        health.post(fake.id, ContractError("slots", "below 8", "a later one"))
        with pytest.raises(ContractError, match="got 9"):
            call()
        assert len(ran) == 1
        call()
        health.post(fake.id, TransientError("asynchronous"))
        with pytest.raises(TransientError, match="asynchronous"):
            hal.check(fake.id)
        hal.check(fake.id)
        assert fake.memory.synchronized == 2
        health.post("other:0", TransientError("elsewhere"))
        call()


@pytest.mark.parametrize("answer", ["the fan stopped", RuntimeError("no answer from the driver")])
def test_check_asks_the_plugin(answer: Any) -> None:
    with installed(Fake(health=answer)) as fake:
        with pytest.raises(DeviceLost, match=str(answer)):
            hal.check(fake.id)
        assert not hal.device(fake.id).available
        with pytest.raises(DeviceLost):
            hal.check(fake.id)


@pytest.mark.parametrize(
    ("error", "lost"),
    [(DeviceLost("fake:0", "gone"), True), (RuntimeError("gone"), True), (TransientError("gone"), False)],
)
def test_check_when_the_device_cannot_synchronise(error: Exception, lost: bool) -> None:
    with installed(Fake()) as fake:
        fake.memory.fail = error
        with pytest.raises(HalError, match="gone"):
            hal.check(fake.id)
        assert hal.device(fake.id).available is not lost


def test_check_without_a_memory_hook() -> None:
    with installed(Fake("bare", health="unwell")) as fake:
        fake.memory = None
        with pytest.raises(DeviceLost, match="unwell"):
            hal.check("bare:0")
        health.release("bare:0")
        with pytest.raises(ContractError, match="hal_memory"):
            hal.empty((1,), "fp32", "bare:0")
    with pytest.raises(ContractError):
        hal.check("nowhere:0")

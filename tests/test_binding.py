"""Who is chosen, in which order, and how a slot follows the world."""

from __future__ import annotations

import gc
import logging
from typing import Any

import numpy as np
import pytest
from fake_backend import SILU, Fake, codes, installed, kernel, manifest, raising

import hal
import hal_ops
from hal import binding
from hal.errors import CompileError, ContractError, OutOfMemory, TransientError, UnsupportedError

X = np.array([[1.0, 2.0, -3.0, 0.5, 1.0, 2.0, 3.0, 4.0]], "float32")


def calls(name: str, log: list[str]) -> Any:
    return lambda *args, **kwargs: log.append(name)


def three(**options: Any) -> Fake:
    return Fake(kernels=[kernel("a.silu", priority=1), kernel("b.silu", priority=3), kernel("c.silu", priority=3)])


def test_priority_then_name() -> None:
    with installed(three()) as fake:
        record = hal.bind(SILU, fake.id).record
        assert record.chosen == "b.silu" and record.requested == SILU
        assert codes(record) == {"a.silu": {"policy"}, "c.silu": {"policy"}}
        assert all("b.silu" in refusal.required for refusal in record.refusals)


def test_preference_beats_priority_and_pin_beats_preference(caplog: pytest.LogCaptureFixture) -> None:
    with installed(three()) as fake:
        bound = hal.bind(SILU, fake.id)
        with hal.policy(prefer=["c.*", "a.*"]):
            assert bound.kernel == "c.silu"
            with hal.policy(prefer=["a.*"]):
                assert bound.kernel == "a.silu"
            with hal.policy(pin={"silu_mul": "b.silu"}):
                assert bound.kernel == "b.silu"
            with caplog.at_level(logging.WARNING, "hal"), hal.policy(deny=["c.silu"]):
                assert bound.kernel == "a.silu"
            assert "a.silu serves, not the preferred c.*" in caplog.text
        assert bound.kernel == "b.silu"


def test_a_slot_is_replaced_by_policy_quarantine_and_plugins() -> None:
    log: list[str] = []
    fake = Fake(kernels=[kernel(f"{n}.silu", run=calls(n, log), priority=-i) for i, n in enumerate("ab")])
    with installed(fake):
        bound = hal.bind(SILU, fake.id)
        bound.fn()
        with hal.policy(deny=["a.*"]):
            bound.fn()
        bound.fn()
        hal.quarantine("a.silu", reason="looks odd")
        bound.fn()
        assert log == ["a", "b", "a", "b"] and "looks odd" in str(bound.record.refusals[0])
        hal.quarantine("b.silu", reason="so does this")
        assert bound.kernel == "" and bound.record.chosen is None
        with pytest.raises(UnsupportedError) as caught:
            bound.fn(1, 2, three=4)
        assert {refusal.kernel for refusal in caught.value.refusals} == {"a.silu", "b.silu"}
        hal.health.release("a.silu")
        bound.fn()
        assert log[-1] == "a"


def test_a_slot_outlives_its_plugin() -> None:
    log: list[str] = []
    with installed(Fake(kernels=[kernel("a.silu", run=calls("old", log))])) as fake:
        bound = hal.bind(SILU, fake.id)
        hal.unregister("fake")
        for _ in range(2):
            with pytest.raises(UnsupportedError, match="fake:0"):
                bound.fn()
        hal.register(Fake(kernels=[kernel("a.silu", run=calls("new", log))]), manifest())
        bound.fn()
        assert log == ["new"]


def test_an_error_raised_again_and_again_does_not_grow() -> None:
    with installed(Fake(kernels=[kernel("a.silu")])) as fake:
        bound = hal.bind(SILU, fake.id)
        with hal.policy(deny=["*"]):
            depths = []
            for _ in range(5):
                with pytest.raises(UnsupportedError) as caught:
                    bound.fn()
                depths.append(len(caught.traceback))
            assert len(set(depths)) == 1


@pytest.mark.parametrize("error", [CompileError("ptxas: no"), RuntimeError("boom"), UnsupportedError("not this")])
def test_a_build_that_fails_is_demoted_once(error: Exception) -> None:
    built: list[Any] = []

    def build(request: Any) -> Any:
        built.append(request)
        raise error

    with installed(Fake(kernels=[kernel("a.silu", build=build, priority=9), kernel("b.silu")])) as fake:
        bound = hal.bind(SILU, fake.id)
        assert bound.kernel == "b.silu" and str(error) in str(bound.record.refusals[0])
        with hal.policy(deny=["nobody"]):
            assert bound.kernel == "b.silu"
        hal.explain(SILU, fake.id)
        assert len(built) == 1


@pytest.mark.parametrize("error", [OutOfMemory("full"), TransientError("busy")])
def test_a_build_that_fails_for_passing_reasons_is_raised(error: Exception) -> None:
    answers: list[Any] = [error, lambda **_: None]

    own = hal_ops.spec("silu_mul", dtype="float32", dim=13)

    def build(request: Any) -> Any:
        answer = answers.pop(0) if request == own else None  # slots of other tests may still be about
        if isinstance(answer, Exception):
            raise answer
        return answer

    with installed(Fake(kernels=[kernel("a.silu", build=build, priority=9), kernel("b.silu")])) as fake:
        with pytest.raises(type(error)):
            hal.bind(own, fake.id)
        assert hal.bind(own, fake.id).kernel == "a.silu"


def test_no_kernel_shows_every_reason() -> None:
    kernels = [
        kernel("a.silu", needs={"dtype": hal.OneOf({"float16"}), "dim": hal.Range(1, 2)}),
        kernel("b.silu", refuse=raising(ValueError("hm"))),
        kernel("other.gemm", "gemm"),
    ]
    with installed(Fake(kernels=kernels)) as fake:
        with pytest.raises(UnsupportedError) as caught:
            hal.bind(SILU, fake.id)
        text = str(caught.value)
        for part in ("silu_mul(dim=4, dtype=float32)", "fake:0", "a.silu", "one of float16", "1 to 2", "b.silu", "hm"):
            assert part in text
        assert "other.gemm" not in text
        with pytest.raises(UnsupportedError, match="claims none"):
            hal.bind(hal_ops.spec("rope", dtype="fp32"), fake.id)


def test_bind_refuses_bad_arguments() -> None:
    with installed(Fake()) as fake:
        for arguments, argument in (
            ((SILU, "nowhere:0"), "device"),
            ((SILU, 3), "device"),
            (("silu_mul", fake.id), "spec"),
            ((SILU, fake.id, "all"), "check"),
        ):
            with pytest.raises(ContractError) as caught:
                hal.bind(*arguments[:2], **({"check": arguments[2]} if arguments[2:] else {}))  # type: ignore[arg-type]
            assert caught.value.argument == argument
        with pytest.raises(ContractError):
            hal.explain("silu_mul")  # type: ignore[arg-type]


def test_bindings_do_not_keep_slots_alive() -> None:
    with installed(Fake()) as fake:
        gc.collect()  # what other tests left
        before = len(binding._bounds)
        bound = hal.bind(SILU, fake.devices[0])
        assert len(binding._bounds) == before + 1
        del bound
        gc.collect()
        assert len(binding._bounds) == before


@pytest.mark.parametrize("level", ["meta", "full"])
def test_check_validates_bound_calls(level: Any) -> None:
    with installed(Fake()) as fake:
        bound = hal.bind(SILU, fake.id, check=level)
        out = np.zeros((1, 4), "float32")
        bound.fn(X, out=out)
        assert out[0, 1] == pytest.approx(2 / (1 + np.exp(-2)) * 2)
        before = out.copy()
        for x, argument in ((X[0], "out"), (X.astype("int8"), "x"), (X.astype("float16"), "out"), ("x", "x")):
            with pytest.raises(ContractError) as caught:
                bound.fn(x, out=out)
            assert caught.value.argument == argument
        wide = np.zeros((1, 16), "float32")
        with pytest.raises(ContractError, match="as bound") as caught:
            bound.fn(wide, out=np.zeros((1, 8), "float32"))
        assert caught.value.argument == "dim" and np.array_equal(out, before)
        with hal.policy(deny=["nobody"]), pytest.raises(ContractError):
            bound.fn(X, out=out[0])  # checked after a change, too


def test_nothing_is_kept_for_a_device_that_left() -> None:
    with installed(Fake()):
        hal_ops.silu_mul(X, device="fake:0")
        assert any(device == "fake:0" for _, device in binding._lookup)
    assert not any(device == "fake:0" for _, device in binding._lookup)
    assert not any(device == "fake:0" for device, _, _ in binding._built)


def test_fallback_to_the_cpu_only_where_allowed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(binding, "FALLBACK", "host:0")
    seen: list[Any] = []
    host = Fake("host", kernels=[kernel("host.silu", run=lambda x, *, out: seen.append((type(x), type(out))))])
    host.memory.wrap = lambda x: ("native", x) if isinstance(x, np.ndarray) else x
    far = Fake("far", kernels=[])
    far.devices = [far.device(features=frozenset())]
    with installed(Fake(kernels=[kernel("fake.silu", needs={})]), host, far) as fake:
        with pytest.raises(UnsupportedError):
            hal.bind(SILU, fake.id)
        with hal.policy(allow_cpu_fallback=True):
            with caplog.at_level(logging.WARNING, "hal"):
                bound = hal.bind(SILU, fake.id)
            assert bound.kernel == "host.silu" and bound.record.evidence["device"] == "host:0"
            assert "fake.silu" in codes(bound.record) and "host:0 serves" in caplog.text
            bound.fn(X, out=X)
            assert seen == [(tuple, tuple)], "arrays become native to the device that serves"
            with pytest.raises(UnsupportedError, match="far:0"):
                hal.bind(SILU, "far:0")
            host.kernels = []
            hal.unregister("host")
            hal.register(host, manifest("host"))
            with pytest.raises(UnsupportedError) as caught:
                hal.bind(SILU, fake.id)
            assert {refusal.kernel for refusal in caught.value.refusals} == {"fake.silu", "host:0"}
        with pytest.raises(UnsupportedError):
            bound.fn(X, out=X)


def test_fallback_without_a_cpu_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "FALLBACK", "nobody:0")
    with installed(Fake(kernels=[])) as fake, hal.policy(allow_cpu_fallback=True):
        assert codes(hal.explain(SILU, fake.id)) == {"fake:0": {"device"}}

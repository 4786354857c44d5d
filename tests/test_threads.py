"""Calls from many threads while plugins come and go, policies change and kernels are quarantined."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
from fake_backend import SILU, Fake, installed, kernel, manifest, silu_mul

import hal
import hal_ops
from hal import health, registry
from hal.errors import ContractError, UnsupportedError

SECONDS = 2.0
X = np.linspace(-3, 3, 80, dtype="float32").reshape(10, 8)


def test_calls_survive_changes_of_the_world() -> None:
    def unsupported(*args: object, **kwargs: object) -> None:
        raise UnsupportedError("never this one")

    fake = Fake(kernels=[kernel(f"{name}.silu", run=silu_mul) for name in "abc"])
    fake.kernels.append(kernel("z.silu", run=unsupported, priority=9))
    guest = Fake("guest")
    bad: list[str] = []
    served = [0]
    stop = threading.Event()
    wanted = {rows: hal_ops.silu_mul(X[:rows], device="cpu:0") for rows in range(1, 11)}

    def caller(seed: int) -> None:
        bound = hal.bind(SILU, "fake:0")
        rows = seed
        while not stop.is_set():
            rows = rows % 10 + 1
            for device in ("fake:0", "guest:0"):
                try:
                    out = hal_ops.silu_mul(X[:rows], device=device)
                    if not np.allclose(out, wanted[rows], rtol=1e-5):
                        bad.append("wrong numbers")
                    out = np.zeros((rows, 4), "float32")
                    bound.fn(X[:rows], out=out)
                    if not np.allclose(out, wanted[rows], rtol=1e-5):
                        bad.append("wrong numbers from a bound kernel")
                    served[0] += 1
                except (UnsupportedError, ContractError):
                    pass  # typed, and the guest is not always there

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                bad.append(repr(error))
                raise

        return run

    def host_guests() -> None:
        while not stop.is_set():
            hal.register(guest, manifest("guest"))
            time.sleep(0.002)
            hal.unregister("guest")

    def change_policies() -> None:
        while not stop.is_set():
            with hal.policy(deny=["a.*"], prefer=["c.*"]), hal.policy(pin={"silu_mul": "[bc].silu"}):
                time.sleep(0.001)

    def quarantine() -> None:
        while not stop.is_set():
            hal.quarantine("b.silu", reason="test")
            time.sleep(0.001)
            health.release("b.silu")

    with installed(fake):
        work = [lambda seed=seed: caller(seed) for seed in range(8)]  # type: ignore[misc]
        threads = [
            threading.Thread(target=guarded(job), daemon=True)
            for job in (*work, host_guests, change_policies, quarantine)
        ]
        for thread in threads:
            thread.start()
        time.sleep(SECONDS)
        stop.set()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads), "deadlock"
        assert not bad, bad[:3]
        assert served[0] > 50
        assert hal.bind(SILU, "fake:0").kernel == "a.silu", "back to normal"
    assert registry.devices() and all(device.plugin != "guest" for device in hal.devices(all=True))


def test_one_build_and_one_slot_for_many_threads() -> None:
    built: list[object] = []

    def build(request: object) -> Callable[..., None]:
        built.append(request)
        time.sleep(0.01)
        return silu_mul

    own = hal_ops.spec("silu_mul", dtype="float32", dim=5)
    slots: list[object] = []
    with installed(Fake(kernels=[kernel("a.silu", build=build)])):
        barrier = threading.Barrier(8)

        def look() -> None:
            barrier.wait()
            slots.append(hal.binding.lookup(own, "fake:0"))

        threads = [threading.Thread(target=look) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(slots) == 8 and len(set(map(id, slots))) == 1 and built.count(own) == 1

"""Claims against specifications."""

from __future__ import annotations

from typing import Any

import pytest
from fake_backend import SILU, everything, raising

from hal import Claim, DType, Flags, MultipleOf, OneOf, OpSpec, Range, Refusal, RefusalCode, match
from hal_ops import spec

PAGED = spec("attention", q_dtype="fp16", head_dim=64, page=16, layout="NHD", features={"lse", "softcap"})


def judge(needs: dict[str, Any], request: OpSpec = PAGED, **claim: Any) -> list[Refusal]:
    needs = {**everything(request.op), **needs}
    return match.refusals(Claim(op=request.op, kernel="k", needs=needs, **claim), request)


@pytest.mark.parametrize(
    ("needs", "field", "code", "required", "actual"),
    [
        ({"q_dtype": OneOf({DType.float32})}, "q_dtype", "dtype", "one of float32", "float16"),
        ({"head_dim": Range(80, 256)}, "head_dim", "shape", "80 to 256", "64"),
        ({"head_dim": Range(None, 32)}, "head_dim", "shape", "at most 32", "64"),
        ({"head_dim": Range(65, None)}, "head_dim", "shape", "at least 65", "64"),
        ({"head_dim": MultipleOf(48)}, "head_dim", "shape", "a multiple of 48", "64"),
        ({"page": OneOf({128})}, "page", "layout", "one of 128", "16"),
        ({"layout": OneOf({"HND"})}, "layout", "layout", "one of HND", "NHD"),
        ({"features": Flags({"lse"})}, "features", "feature", "at most the flags lse", "softcap"),
        ({"features": Flags(set())}, "features", "feature", "at most the flags (none)", "lse, softcap"),
    ],
)
def test_each_constraint(needs: dict[str, Any], field: str, code: str, required: str, actual: str) -> None:
    assert judge(needs) == [Refusal("k", RefusalCode(code), field, required, actual)]


@pytest.mark.parametrize(
    "needs",
    [
        {}, {"q_dtype": OneOf({DType.float16, "x"})}, {"head_dim": Range(64, 64)}, {"head_dim": MultipleOf(64)},
        {"features": Flags({"lse", "softcap", "bias"})}, {"gqa_ratio": OneOf({3})},
    ],
)  # fmt: skip
def test_a_claim_that_covers(needs: dict[str, Any]) -> None:
    assert judge(needs) == []


def test_a_field_that_is_not_named_is_unsupported() -> None:
    found = match.refusals(Claim(op="silu_mul", kernel="k", needs={"dtype": OneOf({DType.float32})}), SILU)
    assert [(refusal.field, refusal.code, refusal.actual) for refusal in found] == [("dim", RefusalCode.shape, "4")]


def test_all_reasons_at_once() -> None:
    found = judge({"q_dtype": OneOf({DType.int8}), "head_dim": Range(1, 2), "features": Flags({"lse"})})
    assert {refusal.field for refusal in found} == {"q_dtype", "head_dim", "features"}


@pytest.mark.parametrize(
    ("declared", "wanted", "fits"),
    [(d, w, d >= w) for d in range(3) for w in range(3)],
)
def test_determinism(declared: int, wanted: int, fits: bool) -> None:
    levels: Any = ("none", "run", "batch")
    found = judge({}, spec("gemm", n=1, determinism=levels[wanted]), determinism=levels[declared])
    assert (found == []) is fits and all(refusal.field == "determinism" for refusal in found)


def test_contract() -> None:
    later, other = OpSpec("x", (1, 3), {}), OpSpec("x", (2, 0), {})
    claim = Claim(op="x", kernel="k", contract=(1, 0))
    assert match.refusals(claim, later) == []
    assert [refusal.code for refusal in match.refusals(claim, other)] == [RefusalCode.contract]


class Unwell:
    admits = staticmethod(raising(KeyError("who?")))


def test_what_raises_becomes_a_refusal() -> None:
    assert "KeyError" in judge({"head_dim": Unwell()})[0].actual
    assert "TypeError" in judge({"layout": Range(1, 2)})[0].actual
    assert "ZeroDivisionError" in judge({}, refuse=raising(ZeroDivisionError()))[0].actual
    assert "TypeError" in judge({}, refuse=lambda _: None)[0].actual  # type: ignore[arg-type,return-value]


def test_predicates_refuse() -> None:
    mine = Refusal("k", RefusalCode.resource, "workspace", "1 GiB", "2 GiB")
    assert judge({}, refuse=lambda _: [mine]) == [mine] and judge({}, refuse=lambda _: []) == []
    assert judge({}, refuse=lambda _: ["too big"])[0].actual == "too big"  # type: ignore[list-item]
    asked: list[OpSpec] = []
    judge({"head_dim": OneOf({1})}, refuse=asked.append)  # type: ignore[arg-type]
    assert not asked, "a predicate may rely on the needs"

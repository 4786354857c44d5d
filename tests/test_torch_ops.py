"""The operators as torch operators: opcheck, fullgraph compilation, no recompilation per token count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import hal_ops
import hal_ops.torch_ops
from hal.errors import ContractError

OPS = torch.ops.hal


def _indices(*lens: int) -> torch.Tensor:
    return torch.tensor(lens, dtype=torch.int32)


def _attention(**changes: Any) -> tuple[Any, ...]:
    """Arguments of ``hal::attention`` up to the device, for two ragged requests."""
    named: dict[str, Any] = {
        "q": torch.randn(5, 4, 8), "k": torch.randn(7, 2, 8), "v": torch.randn(7, 2, 6),
        "q_indptr": _indices(0, 2, 5), "kv_lens": None, "kv_indptr": _indices(0, 3, 7), "block_table": None,
        "alibi_slopes": None, "sinks": None, "mask": None, "bias": None, "k_scale": None, "v_scale": None,
        "layout": "NHD", "scale": None, "causal": True, "window": [-1, -1], "softcap": 0.0,
        "determinism": "none", "kv_slack": "any", "device": None,
    }  # fmt: skip
    return tuple({**named, **changes}.values())


def _paged() -> tuple[Any, ...]:
    cache = torch.randn(4, 4, 2, 8)
    return _attention(
        k=cache,
        v=cache.clone(),
        kv_indptr=None,
        kv_lens=_indices(3, 6),
        block_table=torch.tensor([[0, 9], [1, 2]]).int(),
    )


def _gemm(**changes: Any) -> tuple[Any, ...]:
    named: dict[str, Any] = {
        "bias": torch.randn(4), "c": None, "a_scale": None, "a_zero": None, "b_scale": None, "b_zero": None,
        "trans_a": False, "trans_b": True, "activation": "silu", "alpha": 1.0, "beta": 0.0, "group_size": None,
        "a_quant": "none", "determinism": "none", "device": None,
    }  # fmt: skip
    return tuple({**named, **changes}.values())


def _packed() -> tuple[Any, ...]:
    packed = hal_ops.prepack(torch.randn(4, 8), scheme="dense")
    return list(packed.parts), packed.kernel, packed.scheme.name, *packed.shape


def _states() -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 2, 4), torch.randn(3, 2), torch.randn(3, 2, 4), torch.randn(3, 2)


CASES: dict[str, Any] = {
    "attention": lambda: (*_attention(), None, True),
    "attention_without_lse": lambda: (*_paged(), torch.bfloat16, False),
    "attention_out": lambda: (*_attention(), torch.empty(5, 4, 6)),
    "merge_attention_states": lambda: (*_states(), None),
    "merge_attention_states_out": lambda: (*_states(), torch.empty(3, 2, 4), torch.empty(3, 2), None),
    "gemm": lambda: (torch.randn(2, 3, 8), torch.randn(4, 8), *_gemm(), None),
    "gemm_out": lambda: (torch.randn(3, 8), torch.randn(4, 8), *_gemm(), torch.empty(3, 4)),
    "gemm_packed": lambda: (torch.randn(3, 8), *_packed(), *_gemm(trans_b=False), None),
    "gemm_packed_out": lambda: (torch.randn(3, 8), *_packed(), *_gemm(trans_b=False), torch.empty(3, 4)),
    "kv_write": lambda: (
        torch.randn(3, 2, 8), torch.randn(3, 2, 8), torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8),
        torch.tensor([0, -1, 7]), None, None, "NHD", None,
    ),
    "rms_norm": lambda: (torch.randn(3, 8), torch.randn(8), 1e-6, None),
    "rms_norm_out": lambda: (torch.randn(3, 8), torch.randn(8), 1e-6, torch.randn(3, 8), torch.empty(3, 8), None),
    "rope": lambda: (
        torch.randn(3, 4, 8), torch.randn(3, 2, 8), torch.arange(3), torch.randn(9, 4), torch.randn(9, 4), False, None
    ),
    "silu_mul": lambda: (torch.randn(3, 8), None),
    "silu_mul_out": lambda: (torch.randn(3, 8), torch.empty(3, 4), None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case: str) -> None:
    torch.library.opcheck(getattr(OPS, case.removesuffix("_without_lse")), CASES[case]())


def test_every_registered_operator_is_checked() -> None:
    registered = {
        name.partition("::")[2].partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("hal::")
    }
    assert registered == {case.removesuffix("_without_lse") for case in CASES}


def _layer(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    slots: torch.Tensor, q_indptr: torch.Tensor, kv_lens: torch.Tensor, table: torch.Tensor, weight: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    hal_ops.kv_write(k, v, k_cache, v_cache, slots)
    o = hal_ops.attention(q, k_cache, v_cache, q_indptr=q_indptr, kv_lens=kv_lens, block_table=table)
    return hal_ops.gemm(o.reshape(o.shape[0], -1), weight, trans_b=True, activation="silu") * 2


def _step(tokens: int) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(tokens, 4, 8), torch.randn(tokens, 2, 8), torch.randn(tokens, 2, 8),
        torch.zeros(4, 16, 2, 8), torch.zeros(4, 16, 2, 8), torch.arange(tokens) + 16, _indices(0, tokens),
        _indices(tokens), torch.tensor([[1, 2]]).int(), torch.ones(6, 32),
    )  # fmt: skip


def test_compile_fullgraph_with_dynamic_token_counts() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(_layer, fullgraph=True, backend=counter)
    for tokens in (3, 5, 8, 13, 21):
        arguments = _step(tokens)
        fresh = [x.clone() for x in arguments]
        torch.testing.assert_close(compiled(*arguments), _layer(*fresh), rtol=0, atol=0)
        assert torch.equal(arguments[3], fresh[3])  # kv_write reached the caller's cache
        assert arguments[3].abs().sum() > 0
    assert counter.frame_count <= 2  # one static trace, one with the token count left open


@pytest.mark.slow
def test_compile_with_inductor() -> None:
    torch._dynamo.reset()
    arguments = _step(7)
    fresh = [x.clone() for x in arguments]
    torch.testing.assert_close(torch.compile(_layer, fullgraph=True)(*arguments), _layer(*fresh))


def test_compiled_packed_weight_and_companions() -> None:
    torch._dynamo.reset()
    packed = hal_ops.prepack(torch.randn(8, 8), scheme="dense")

    def block(x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return hal_ops.silu_mul(hal_ops.gemm(hal_ops.rms_norm(x, norm, 1e-6), packed))

    x, norm = torch.randn(3, 8), torch.randn(8)
    torch.testing.assert_close(torch.compile(block, fullgraph=True, backend="aot_eager")(x, norm), block(x, norm))


def test_compiled_merge_and_lse() -> None:
    torch._dynamo.reset()

    def halves(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        first = hal_ops.attention(q, k[:3], k[:3], causal=False, return_lse=True)
        second = hal_ops.attention(q, k[3:], k[3:], causal=False, return_lse=True)
        return hal_ops.merge_attention_states(*first, *second)[0]

    q, k = torch.randn(2, 2, 8), torch.randn(7, 2, 8)
    whole = hal_ops.attention(q, k, k, causal=False)
    torch.testing.assert_close(torch.compile(halves, fullgraph=True, backend="aot_eager")(q, k), whole)


def test_plan_in_a_compiled_region_is_refused() -> None:
    torch._dynamo.reset()
    plan = hal_ops.plan_attention(q_indptr=[0, 2], kv_indptr=[0, 3])
    with pytest.raises(ContractError, match="plan"):
        hal_ops.torch_ops.attention(*(None,) * 7, plan, *(None,) * 17)

    def compiled(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return hal_ops.attention(q, k, k, plan=plan)

    # Dynamo reports the raise in its own words; what counts is that the call is never traced without its plan.
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(compiled, fullgraph=True, backend="eager")(torch.randn(2, 2, 8), torch.randn(3, 2, 8))

"""torch.merge: two attention states over disjoint keys become one."""

from __future__ import annotations

from math import inf

import torch
from torch import Tensor

from hal.constraint import Constraint, OneOf, Range
from hal.dtype import DType
from hal.types import Claim, Kernel


def kernel(prefix: str = "torch") -> Kernel:
    """The merge kernel; ``prefix`` is the library part of its name."""
    needs: dict[str, Constraint] = {
        "dtype": OneOf({DType.float32, DType.float16, DType.bfloat16}),
        "heads": Range(1, None),
        "head_dim": Range(1, None),
    }
    claim = Claim(op="merge_attention_states", kernel=f"{prefix}.merge", needs=needs, determinism="run")
    return Kernel(claim, lambda spec: merge_attention_states)


def merge_attention_states(
    o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, *, out: Tensor, lse_out: Tensor
) -> None:
    """Write the softmax-weighted mean of two states, in float32.

    Shapes: o ``[..., D]``, lse ``[...]`` in natural log. ``(anything, -inf)`` is the identity, both
    empty give ``(0, -inf)``. The outputs may be the inputs. Formula: Dao et al. 2022, section 3.1.
    """
    top = torch.maximum(lse_a, lse_b)
    base = top.masked_fill(top == -inf, 0)
    weight_a, weight_b = (lse_a - base).exp_(), (lse_b - base).exp_()
    total = weight_a + weight_b
    share = total.clamp_min(1)  # the larger weight is 1; a total of 0 means that both are empty
    merged = _weighted(o_a, weight_a / share, lse_a) + _weighted(o_b, weight_b / share, lse_b)
    lse_out.copy_(total.log_().add_(base))
    out.copy_(merged)


def _weighted(o: Tensor, weight: Tensor, lse: Tensor) -> Tensor:
    # An empty state counts for nothing even when its output was never written.
    return (o.float() * weight.unsqueeze(-1)).masked_fill_((lse == -inf).unsqueeze(-1), 0)

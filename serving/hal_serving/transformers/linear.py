"""Linear and embedding layers whose weights stay as they lie in a model file."""

from __future__ import annotations

import threading
from typing import Any

import gguf
import torch
from torch import nn

import hal
import hal_ops
from hal.errors import UnsupportedError
from hal_ops.spec import bucket
from hal_serving.transformers import role as roles

_GGUF = {
    "gguf_q4_0": gguf.GGMLQuantizationType.Q4_0,
    "gguf_q4_1": gguf.GGMLQuantizationType.Q4_1,
    "gguf_q8_0": gguf.GGMLQuantizationType.Q8_0,
}


_packing = threading.Lock()  # one for all layers: packing is rare, and a lock of its own could not be copied


class HalLinear(nn.Module):
    """``x @ W.T + bias`` as ``hal_ops.gemm`` on the device of the role that runs.

    The weight is no parameter. It is packed once per device, when that device first needs it.

    Args:
        weight: dense ``[n, k]``, or uint8 GGUF blocks of any shape (a view of the mapped file will do).
        scheme: ``"dense"``, ``"gguf_q4_0"``, ``"gguf_q4_1"`` or ``"gguf_q8_0"``.
        shape: ``(n, k)``; may be left out for a dense weight.
        bias: ``[n]``.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        *,
        scheme: str,
        shape: tuple[int, int] | None = None,
        bias: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.source = weight.detach()
        self.scheme = scheme
        self.out_features, self.in_features = shape if shape is not None else tuple(weight.shape)
        self.bias = None if bias is None else bias.detach()
        self._packed: dict[str | None, hal_ops.PackedWeight] = {}
        self._noted: set[Any] = set()  # (role, rows, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to ``[..., k]``; returns ``[..., n]`` of ``x``'s dtype."""
        forward = roles.current()
        role = None if forward is None else forward.role
        device = None if role is None else role.device
        packed = self._packed.get(device) or self._pack(device)
        # A batch's last tokens are a strided view; not every device reads those.
        rows = x.view(-1, self.in_features) if x.is_contiguous() else x.reshape(-1, self.in_features).contiguous()
        out = hal_ops.gemm(rows, packed, bias=self.bias, device=device)
        if role is not None and (role, len(rows), x.dtype) not in self._noted:
            self._noted.add((role, len(rows), x.dtype))
            role.note(self.prepack_spec())
            role.note(self.gemm_spec(x.dtype, len(rows), packed.kernel))
        return out.view(*x.shape[:-1], self.out_features)

    def renew(self) -> None:
        """Forget packed weights that another kernel would pack now, and what was noted for former roles."""
        self._noted.clear()
        for device, packed in list(self._packed.items()):
            if device is None or hal.explain(self.prepack_spec(), device).chosen != packed.kernel:
                del self._packed[device]

    def _pack(self, device: str | None) -> hal_ops.PackedWeight:
        with _packing:
            if device not in self._packed:
                shape = (self.out_features, self.in_features)
                self._packed[device] = hal_ops.prepack(self.source, scheme=self.scheme, shape=shape, device=device)
            return self._packed[device]

    def __getstate__(self) -> dict[str, Any]:
        """What a copy takes along: packed weights belong to a device's kernel and are made again."""
        return {**self.__dict__, "_packed": {}}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Put the weight where ``nn.Linear`` would, so that ``save_pretrained`` writes a whole model.

        Raises:
            UnsupportedError: the weight is made of blocks, which a checkpoint of dense tensors cannot hold.
        """
        if self.scheme != "dense":
            raise UnsupportedError(
                f"{prefix}weight is stored as {self.scheme}; keep the file that it came from instead"
            )
        destination[f"{prefix}weight"] = self.source
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias

    def prepack_spec(self) -> Any:
        """The specification of packing this weight."""
        return hal_ops.spec(
            "prepack",
            scheme=self.scheme,
            n=self.out_features,
            k=self.in_features,
            w_dtype=self.source.dtype if self.scheme == "dense" else None,
            features={"trans_b"},
        )

    def gemm_spec(self, dtype: torch.dtype, rows: int, packed: str) -> Any:
        """The specification of applying it to ``rows`` rows of ``dtype``, once the kernel ``packed`` has packed it."""
        return hal_ops.spec(
            "gemm",
            a_dtype=dtype,
            out_dtype=dtype,
            m=bucket(rows),
            n=self.out_features,
            k=self.in_features,
            scheme=self.scheme,
            packed=packed,
            features={"bias"} if self.bias is not None else (),
        )

    def extra_repr(self) -> str:
        """As torch's own linear layers print."""
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, scheme={self.scheme}"


class HalEmbedding(nn.Module):
    """Embedding over GGUF blocks: only the rows that are looked up are dequantised.

    Args:
        blocks: uint8 blocks of the ``[n, k]`` table, any shape (a view of the mapped file will do).
        scheme: as in ``HalLinear``.
        shape: ``(n, k)``.
        dtype: of the result.
    """

    def __init__(self, blocks: torch.Tensor, scheme: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = shape
        self.scheme = scheme
        self.dtype = dtype
        self.blocks = blocks.detach().reshape(self.num_embeddings, -1)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``[...]`` ids -> ``[..., k]``."""
        rows = self.blocks[input_ids.reshape(-1)].numpy()
        values = torch.from_numpy(gguf.quants.dequantize(rows, _GGUF[self.scheme]))
        return values.to(self.dtype).view(*input_ids.shape, self.embedding_dim)

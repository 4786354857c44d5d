"""``PagePool``: the pages of one cache on one device, shared by all layers."""

from __future__ import annotations

import torch

from hal_ops.spec import bucket
from hal_serving.transformers.format import CacheFormat


class PagePool:
    """K and V tensors per layer in one format, the list of free pages, and a reference count per page.

    A page id means the same place in every layer. Pages are counted, so that requests with a common history
    (beams, repeated prompts) share it until one of them writes.
    """

    def __init__(self, kv_format: CacheFormat) -> None:
        self.format = kv_format
        self.pages = 0
        self.refs: list[int] = []
        self.free: list[int] = []
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def caches(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V tensor of ``layer``, made on first use for heads like ``k``'s ``[T, Hkv, Dk]`` and ``v``'s."""
        found = self.layers.get(layer)
        if found is None:
            found = self.layers[layer] = (self._zeros(k), self._zeros(v))
        return found

    def take(self) -> int:
        """Return a page that nobody else uses."""
        if not self.free:
            self.reserve(self.pages + 1)
        page = self.free.pop()
        self.refs[page] = 1
        return page

    def share(self, page: int) -> None:
        """Count one more user of ``page``."""
        self.refs[page] += 1

    def release(self, page: int) -> None:
        """Count one user less; the last one frees the page."""
        self.refs[page] -= 1
        if self.refs[page] == 0:
            self.free.append(page)
            if self.format.slack == "finite":  # what its user left may be NaN, and the next user may not fill it
                for k, v in self.layers.values():
                    k[page] = 0
                    v[page] = 0

    def reserve(self, pages: int) -> None:
        """Grow to at least ``pages`` pages, by powers of two so that copies are rare."""
        if pages <= self.pages:
            return
        pages = bucket(pages)
        self.free[:0] = range(pages - 1, self.pages - 1, -1)  # low ids are taken first: rows of a batch stay in order
        self.refs += [0] * (pages - self.pages)
        self.pages = pages
        self._rebuild()

    def widen(self, tokens: int) -> None:
        """Make room for ``tokens`` tokens in a page, where a request must fit in one."""
        fitting = self.format.fitting(tokens)
        if fitting != self.format:
            self.format = fitting
            self._rebuild()

    def _rebuild(self) -> None:
        self.layers = {layer: (self._enlarged(k), self._enlarged(v)) for layer, (k, v) in self.layers.items()}

    def _enlarged(self, old: torch.Tensor) -> torch.Tensor:
        heads, dim = (old.shape[2] if self.format.layout == "NHD" else old.shape[1]), old.shape[3]
        new = self._zeros(old.new_empty((0, heads, dim)))
        new[tuple(slice(n) for n in old.shape)] = old
        return new

    def _zeros(self, like: torch.Tensor) -> torch.Tensor:
        # Zeros, because kernels that want finite slack get this memory. Never an inference tensor, which could not be
        # written by a later forward that runs outside of torch.inference_mode.
        with torch.inference_mode(False):
            return torch.zeros(
                self.format.shape(self.pages, like.shape[1], like.shape[2]), dtype=like.dtype, device=like.device
            )

"""The shape of a model, as far as kernels are chosen by it. Imports no torch: commands read it."""

from __future__ import annotations

import msgspec


class AttentionShape(msgspec.Struct, frozen=True):
    """What kernels are chosen by: heads on one rank, and the columns of a layer's products."""

    heads: int
    kv_heads: int
    dim: int
    hidden: int
    wide: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.heads} and {self.kv_heads} heads of {self.dim}, {self.hidden} and {self.wide} columns"

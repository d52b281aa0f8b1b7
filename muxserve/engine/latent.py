"""What latent attention over the unified pool has in common on CPUs and GPUs.

A layer keeps one vector of each token, the same for all query heads: the latent and the rotated part of the key. So a
block has one page for each layer, which holds these vectors one after the other, and nothing is folded. Each layer has
its own pages, though, where vLLM has one table for all layers.
"""

from __future__ import annotations

from typing import Any

import torch


class ByLayer:
    """Attention of one layer that reads the pages of its own: to be put before an `MLACommonImpl` of vLLM's."""

    def tables_of(self, meta: Any) -> torch.Tensor:
        """This layer's block table, int32 [requests, blocks], of those whose pages are read, decoding ones first."""
        raise NotImplementedError

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: torch.Tensor, attn_metadata: Any, layer: Any) -> Any:
        assert attn_metadata.decode is not None
        attn_metadata.decode.block_table = self.tables_of(attn_metadata)[: attn_metadata.num_decodes]
        return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)  # type: ignore[misc]

    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        assert attn_metadata.prefill is not None
        # A prompt reads pages when some of it was computed before.
        if attn_metadata.prefill.chunked_context:
            attn_metadata.prefill.block_table = self.tables_of(attn_metadata)[attn_metadata.num_decodes :]
        super().forward_mha(  # type: ignore[misc]
            q, kv_c_normed, k_pe, kv_c_and_k_pe_cache, attn_metadata, k_scale, output, output_scale
        )

"""Block tables of the folded rows of one step, for every layer, in memory whose address never changes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from muxserve.engine.cuda import kernels

# Tables of all layers at once may take this much; longer contexts are gathered layer by layer into one table.
MAX_BYTES = 128 << 20


@dataclass(frozen=True)
class TableShape:
    """How large the tables of an engine must be: `rows` sequences of up to `blocks` blocks in `layers` layers."""

    layers: int
    rows: int
    blocks: int

    @property
    def together(self) -> bool:
        """Whether the tables of all layers are gathered in one go."""
        return 4 * self.layers * self.rows * self.blocks <= MAX_BYTES

    @property
    def bytes(self) -> int:
        """Device memory that the tables take."""
        return 4 * (self.layers if self.together else 1) * self.rows * self.blocks


@dataclass(slots=True)
class _Batch:
    """What a table of another layer is gathered from."""

    page_table: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    requests: int
    max_blocks: int
    head_major: bool


class FoldedTables:
    """The tables of the current step. One kernel gathers all layers at once where memory allows, else each layer's
    attention gathers its own; either can be part of a captured graph."""

    def __init__(self, shape: TableShape, block_tokens: int, device: torch.device) -> None:
        self.shape = shape
        self.block_tokens = block_tokens
        layers = shape.layers if shape.together else 1
        # Zeros: what is never written must still name a page that exists.
        self._tables = torch.zeros((layers, shape.rows, shape.blocks), dtype=torch.int32, device=device)
        self._batch: _Batch | None = None
        self._rows = 0

    def begin(
        self,
        page_table: torch.Tensor,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        requests: int,
        max_seq_len: int,
        head_major: bool,
    ) -> None:
        """Start a step of `requests` requests, the longest having `max_seq_len` tokens."""
        max_blocks = min(-(-max_seq_len // self.block_tokens), self.shape.blocks, block_table.shape[1])
        self._rows = requests * page_table.shape[2]
        batch = _Batch(page_table, block_table, seq_lens, requests, max_blocks, head_major)
        if self.shape.together:
            self._gather(batch, 0)
        else:
            self._batch = batch

    def layer(self, index: int) -> torch.Tensor:
        """Block table of one layer, int32 [R*H, blocks]; valid until the next call."""
        if self.shape.together:
            return self._tables[index, : self._rows]
        assert self._batch is not None
        self._gather(self._batch, index)
        return self._tables[0, : self._rows]

    def _gather(self, batch: _Batch, first_layer: int) -> None:
        kernels.gather_tables(
            batch.page_table,
            batch.block_table,
            batch.seq_lens,
            self.block_tokens,
            batch.head_major,
            self._tables,
            batch.requests,
            batch.max_blocks,
            first_layer,
        )

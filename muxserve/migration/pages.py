"""The pages of a model on one rank, by blocks: as the migrator reads and writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from muxserve.memory import _native
from muxserve.memory.client import MemoryClient
from muxserve.memory.view import ModelView
from muxserve.migration.tasks import Buffer, StatePart
from muxserve.spec import UnitSpec


@dataclass(frozen=True, slots=True)
class ModelShape:
    """`layout` is equal where KV can be exchanged (`UnitSpec.layout`); `block_bytes` are those of one rank. The first
    `state_blocks` blocks of a request hold its state."""

    layout: str
    block_bytes: int
    block_tokens: int
    state_blocks: int = 0


def shapes_of(unit_spec: UnitSpec) -> dict[str, ModelShape]:
    """The layout of each model of the unit."""
    return {
        model.name: ModelShape(
            unit_spec.layout(model.name),
            model.pages_per_block * unit_spec.pool(model.pool).page_bytes,
            model.block_tokens,
            model.state_blocks,
        )
        for model in unit_spec.models
    }


PageIds = npt.NDArray[np.int32]


class Pages(Protocol):
    """Blocks are those of the model's page table; the pages of a block come in the table's order. With a `part` they
    are all blocks of a state, and only that part of their pages is meant (`StatePart`).

    Every method raises `IndexError` for a block that the table does not have.
    """

    def copy_to(
        self, blocks: Sequence[int], destination: Any, destination_blocks: Sequence[int], part: StatePart = None
    ) -> None:
        """Copy blocks into those of another pool, mapped here by an object of the same kind."""

    def gather(self, blocks: Sequence[int], part: StatePart = None) -> Buffer:
        """Their pages one after another: uint8[blocks * pages of a block * page_bytes], on the host."""

    def scatter(self, data: Buffer, blocks: Sequence[int], part: StatePart = None) -> None:
        """Write what `gather` gave."""


MakePages = Callable[[ModelView], Pages]


class HostPages:
    """Pages in shared memory. Copying lets other threads of Python run."""

    def __init__(self, view: ModelView) -> None:
        self.table = view.page_table
        self.pool = view.pool

    def copy_to(
        self, blocks: Sequence[int], destination: HostPages, destination_blocks: Sequence[int], part: StatePart = None
    ) -> None:
        """See `Pages`."""
        theirs = pages_of(destination.table, destination_blocks, part)
        _native.copy_pages(self.pool, pages_of(self.table, blocks, part), destination.pool, theirs)

    def gather(self, blocks: Sequence[int], part: StatePart = None) -> Buffer:
        """See `Pages`."""
        pages = pages_of(self.table, blocks, part)
        out: Buffer = np.empty(pages.size * self.pool.shape[1], dtype=np.uint8)
        _native.gather_pages(self.pool, pages, out)
        return out

    def scatter(self, data: Buffer, blocks: Sequence[int], part: StatePart = None) -> None:
        """See `Pages`."""
        _native.scatter_pages(data, self.pool, pages_of(self.table, blocks, part))


def pages_of(table: PageIds, blocks: Sequence[int], part: StatePart = None) -> PageIds:
    """The pages of some blocks, in the order of the table: int32[blocks * layers * heads], a copy. With a `part`: of a
    state in these blocks, that part of its pages in the order in which they hold it.

    Raises:
        IndexError: a block that is not in the table, or the null block.
    """
    ids = np.asarray(blocks, dtype=np.int64)
    if ids.size and (ids.min() < 1 or ids.max() >= table.shape[0]):
        raise IndexError(f"blocks are 1 to {table.shape[0] - 1}, not {ids.min()} to {ids.max()}")
    pages: PageIds = np.ascontiguousarray(table[ids].reshape(-1))
    if part is None:
        return pages
    pages.sort()
    per_block = pages.size // ids.size
    return pages[part[0] * per_block : part[1] * per_block]


def of_all_ranks(client: MemoryClient, model: str, ranks: int, make: MakePages) -> list[Pages]:
    """The pages of a model on each rank.

    Raises:
        MemoryManagerGone: the memory is not there any more.
        MemoryManagerError: the manager has no such model.
    """
    return [make(client.map(model, rank)) for rank in range(ranks)]

"""The page table of a model on the GPU, kept up to date with what the steps need of it.

The memory manager writes the table in shared memory. A block's row does not change while anyone holds the block, so an
engine copies a row when a request gets the block, and never again while it keeps it: a decode step moves the rows of
the blocks that it begins, which most steps do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from muxserve.engine.cuda import kernels

# Rows staged at once. More are sent in several goes.
STAGED_ROWS = 512
# Staging buffers, so that one can be filled while the copies of others are under way.
STAGING_BUFFERS = 4


def new_blocks(scheduler_output: Any) -> list[int]:
    """Blocks that requests of this step (vLLM's `SchedulerOutput`) hold and did not hold in their last one."""
    ids: list[int] = []
    for request in scheduler_output.scheduled_new_reqs:
        for group in request.block_ids:
            ids.extend(group)
    for groups in scheduler_output.scheduled_cached_reqs.new_block_ids:
        for group in groups or ():
            ids.extend(group)
    return ids


class DevicePageTable:
    """`table` int32 [blocks, L, H] on the device; -1 where a row was never uploaded, and in the row of block 0.

    Its address never changes, so that captured graphs stay valid.

    Args:
        source: int32 [blocks, L, H] in shared memory, as the memory manager keeps it.
        device: where the table lies; on a CPU the same is done without staging.
    """

    def __init__(self, source: npt.NDArray[np.int32], device: torch.device) -> None:
        self.table = torch.full(source.shape, -1, dtype=torch.int32, device=device)
        self.uploaded_rows = 0
        self.uploaded_bytes = 0
        self._source = source.reshape(source.shape[0], -1)
        width = self._source.shape[1]
        on_gpu = device.type == "cuda"
        buffers, rows = (STAGING_BUFFERS, STAGED_ROWS) if on_gpu else (1, STAGED_ROWS)
        self._staging = [torch.empty((rows, 1 + width), dtype=torch.int32, pin_memory=on_gpu) for _ in range(buffers)]
        self._device_staging = torch.empty_like(self._staging[0], device=device) if on_gpu else None
        self._copied: list[torch.cuda.Event | None] = [None] * buffers
        self._next = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Blocks, layers, KV heads."""
        return tuple(self.table.shape)

    def rebind(self, source: npt.NDArray[np.int32]) -> None:
        """Forget every row and read from the table of a restarted memory manager.

        Raises:
            ValueError: it is of another shape.
        """
        if source.reshape(source.shape[0], -1).shape != self._source.shape:
            raise ValueError(f"the page table is {source.shape} now and was {tuple(self.table.shape)}")
        self._source = source.reshape(source.shape[0], -1)
        self.table.fill_(-1)

    def update(self, block_ids: Sequence[int]) -> None:
        """Copy the rows of these blocks; kernels launched after this on the current stream see them."""
        for first in range(0, len(block_ids), STAGED_ROWS):
            self._upload(block_ids[first : first + STAGED_ROWS])

    def _upload(self, block_ids: Sequence[int]) -> None:
        index = self._next
        self._next = (index + 1) % len(self._staging)
        event = self._copied[index]
        if event is not None:
            event.synchronize()  # the buffer's last copy; long done unless the GPU is many steps behind
        ids = np.fromiter(block_ids, dtype=np.int32, count=len(block_ids))
        staged = self._staging[index][: len(ids)]
        rows = staged.numpy()
        rows[:, 0] = ids
        rows[:, 1:] = self._source[ids]
        if self._device_staging is not None:
            on_device = self._device_staging[: len(ids)]
            on_device.copy_(staged, non_blocking=True)
            if event is None:
                event = self._copied[index] = torch.cuda.Event()
            event.record()
            staged = on_device
        kernels.scatter_rows(staged, self.table)
        self.uploaded_rows += len(ids)
        self.uploaded_bytes += rows.nbytes


def table_bytes(blocks: int, layers: int, kv_heads: int) -> int:
    """Device memory of a page table."""
    return 4 * blocks * layers * kv_heads


def missing(table: DevicePageTable, block_ids: Iterable[int]) -> list[int]:
    """Which of these blocks were never uploaded; reads the device, so for tests and diagnosis only."""
    ids = torch.tensor(sorted(set(block_ids)), dtype=torch.long, device=table.table.device)
    known = (table.table[ids].flatten(1) >= 0).all(dim=1)
    return [int(i) for i, ok in zip(ids.tolist(), known.tolist(), strict=True) if not ok]

"""The pages of a model on one GPU, as the migrator reads and writes them.

Pages are gathered on the device into one contiguous tensor and cross to the host, or to another device, as a whole; a
copy per page would be thousands of launches. Between two GPUs of one machine torch copies directly if they are peers.
Under MPS the migrator is a client of the server of its unit and sees those GPUs only: to a unit on others it cannot map
the pool then, and sends the pages through the host.

Tested with tensors on the CPU; untested on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from muxserve.memory.view import ModelView
from muxserve.migration.pages import PageIds, pages_of
from muxserve.migration.tasks import Buffer, StatePart


class DevicePages:
    """See `muxserve.migration.pages.Pages`. Every method returns when its copy is done.

    Args:
        pool: uint8[num_pages, page_bytes]; by default the view's pool, mapped on its GPU.
    """

    def __init__(self, view: ModelView, pool: torch.Tensor | None = None) -> None:
        self.table = view.page_table
        self._memory = view.device_pool if pool is None else None
        self.pool = _mapped(view) if pool is None else pool

    def copy_to(
        self, blocks: Sequence[int], destination: DevicePages, destination_blocks: Sequence[int], part: StatePart = None
    ) -> None:
        """See `Pages`."""
        pages = self._gathered(blocks, part)
        theirs = destination.pages_of(destination_blocks, part)
        destination.pool.index_copy_(0, theirs, pages.to(destination.pool.device, non_blocking=True))
        _finish(destination.pool)

    def gather(self, blocks: Sequence[int], part: StatePart = None) -> Buffer:
        """See `Pages`."""
        pages = self._gathered(blocks, part)
        out = torch.empty(pages.shape, dtype=torch.uint8, pin_memory=self.pool.is_cuda)
        out.copy_(pages, non_blocking=True)
        _finish(self.pool)
        return out.reshape(-1).numpy()

    def scatter(self, data: Buffer, blocks: Sequence[int], part: StatePart = None) -> None:
        """See `Pages`."""
        pages = self.pages_of(blocks, part)
        if data.size != len(pages) * self.pool.shape[1]:
            raise ValueError(f"{data.size} bytes do not fill {len(pages)} pages of {self.pool.shape[1]} bytes")
        # A frame that came over the network is read-only, which torch has no notion of.
        host = torch.from_numpy(np.require(data, requirements="W")).reshape(len(pages), -1)
        self.pool.index_copy_(0, pages, host.to(self.pool.device))
        _finish(self.pool)

    def pages_of(self, blocks: Sequence[int], part: StatePart = None) -> torch.Tensor:
        """int64[pages of the blocks], on the pool's device."""
        if self._memory is not None:
            self._memory.sync()
        pages: PageIds = pages_of(self.table, blocks, part)
        if pages.size and (pages.min() < 1 or pages.max() >= self.pool.shape[0]):
            raise IndexError(f"pages are 1 to {self.pool.shape[0] - 1}, not {pages.min()} to {pages.max()}")
        return torch.from_numpy(pages).to(self.pool.device, torch.int64)

    def _gathered(self, blocks: Sequence[int], part: StatePart) -> torch.Tensor:
        return self.pool.index_select(0, self.pages_of(blocks, part))


def _mapped(view: ModelView) -> torch.Tensor:
    """The pool of a view on the GPU that it lies on.

    Raises:
        ValueError: this process does not see that GPU.
    """
    pool: Any = view.device_pool
    if pool is None:
        raise ValueError(f"the pool of {view.name!r} is not on a GPU")
    wanted = pool.device_uuid.removeprefix("GPU-")
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid).removeprefix("GPU-") == wanted:
            return torch.as_tensor(pool, device=f"cuda:{index}")
    raise ValueError(f"this process does not see the GPU {pool.device_uuid}")


def _finish(pool: torch.Tensor) -> None:
    if pool.is_cuda:
        torch.cuda.current_stream(pool.device).synchronize()

"""The memory manager's shared memory, as it looks from a process that maps it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from muxserve.memory import _native
from muxserve.memory.device import DeviceMemory, is_device_handle, map_device_pool
from muxserve.memory.errors import MemoryManagerGone

BlockIds = npt.NDArray[np.int32]
_POSIX = "posix:"


@dataclass(frozen=True, slots=True)
class ModelView:
    """One model's memory, mapped into this process.

    Attributes:
        page_table: int32[num_blocks, layers, kv_heads], read-only: the page behind each head of each block. The row of
            a block is valid while the block is held.
        pool: uint8[num_pages, page_bytes], writable; views of models of one pool share it. Empty for a pool on a GPU.
        device_pool: the pool, if it is on a GPU. It is mapped when it is first asked for, so that a process which only
            reads tables and counters leaves the GPU alone.
        counters: live numbers, read from shared memory without a lock: free_pages and pool_cached_pages of the pool,
            used_pages (owned or handed off), cached_pages and quota_pages of the model, and available_blocks, the
            blocks that could be reserved now.
    """

    name: str
    index: int
    page_table: BlockIds
    pool: npt.NDArray[np.uint8]
    counters: _native.CountersView
    _mappings: tuple[_native.Mapping, ...] = field(repr=False)
    _map_device_pool: Callable[[], DeviceMemory] | None = field(default=None, repr=False)

    @property
    def device_pool(self) -> DeviceMemory | None:
        """See above.

        Raises:
            MemoryManagerGone: the memory is not there any more.
            DeviceMemoryError: it cannot be mapped.
        """
        return None if self._map_device_pool is None else self._map_device_pool()

    @property
    def current(self) -> bool:
        """Whether this is still the memory that a client connecting now would map. It is after the manager was killed
        and started again with the same configuration; it is not after the manager was stopped."""
        return all(mapping.current for mapping in self._mappings)


class Views:
    """Maps what the manager describes; what several models share is mapped once.

    Args:
        socket_path: where the manager listens, for pools on a GPU.
    """

    def __init__(self, socket_path: str) -> None:
        self._socket_path = socket_path
        self._pools: dict[tuple[int, int], _native.Mapping] = {}
        self._counters: _native.Mapping | None = None

    def view(self, description: Mapping[str, Any], model: Mapping[str, Any], rank: int) -> ModelView:
        """See `MemoryClient.map`; `model` is its entry in the manager's `description`."""
        pool = description["pools"][model["pool_index"]]
        index, blocks, layers, heads = model["index"], model["num_blocks"], model["layers"], model["kv_heads"]
        if self._counters is None:
            name = f"{description['prefix']}.counters"
            self._counters = _native.Mapping(name, _native.COUNTERS_BYTES, writable=False)
        table = _native.Mapping(model["table"], blocks * layers * heads * 4, writable=False)
        page_table = table.page_table(blocks, layers, heads)
        counters = _native.CountersView(self._counters, pool["index"], index, layers * heads, blocks)
        handles: list[str] = pool["handles"]
        if not 0 <= rank < len(handles):
            raise ValueError(f"pool {pool['name']!r} is on {len(handles)} ranks; there is no rank {rank}")
        handle, pages, page_bytes = handles[rank], pool["num_pages"], pool["page_bytes"]
        if is_device_handle(handle):
            pool_of = cache(partial(map_device_pool, self._socket_path, handle, pool["index"], rank, pages, page_bytes))
            nothing = np.empty((0, page_bytes), dtype=np.uint8)
            shared = (table, self._counters)
            return ModelView(model["name"], index, page_table, nothing, counters, shared, pool_of)
        if not handle.startswith(_POSIX):
            raise MemoryManagerGone(f"this client cannot map pool memory of the kind {handle!r}")
        memory = self._pools.get((pool["index"], rank))
        if memory is None:
            memory = _native.Mapping(handle.removeprefix(_POSIX), pages * page_bytes, writable=True)
            self._pools[pool["index"], rank] = memory
        mappings = (table, memory, self._counters)
        return ModelView(model["name"], index, page_table, memory.pages(pages, page_bytes), counters, mappings)

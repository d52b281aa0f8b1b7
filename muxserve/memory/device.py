"""Pools in GPU memory, as engines map them."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from muxserve.memory import _native

VMM = "cuda-vmm:"
CHUNKS = "cuda-vmm-chunks:"
LEGACY = "cuda-ipc:"


class DeviceMemory:
    """A pool on one GPU, mapped until the last user of the object is gone: uint8 [num_pages, page_bytes].

    torch takes it up without a copy: `torch.as_tensor(pool, device="cuda")`; the tensor keeps it alive. Nothing orders
    accesses with those of other processes: a page belongs to who holds its block.
    """

    def __init__(self, mapping: _native.CudaMapping | _native.ChunkMapping, num_pages: int, page_bytes: int) -> None:
        if num_pages * page_bytes > mapping.bytes:
            raise ValueError("the mapping is smaller than the pool")
        self._mapping = mapping
        self.shape = (num_pages, page_bytes)

    def sync(self) -> None:
        """Before anything computes on pages of blocks that were got since the last call: their chunks may have come.

        Raises:
            MemoryManagerGone: the manager is gone.
            DeviceMemoryError: the driver refused; says why and what to do.
        """
        if isinstance(self._mapping, _native.ChunkMapping):
            self._mapping.sync()

    @property
    def address(self) -> int:
        """Where it is mapped in this process; the same as long as the object lives."""
        return self._mapping.address

    @property
    def bytes(self) -> int:
        """Size of the mapping, which the driver's granularity rounds up."""
        return self._mapping.bytes

    @property
    def device_uuid(self) -> str:
        """The UUID of the GPU, as NVML writes it."""
        return self._mapping.device_uuid

    @property
    def handle(self) -> str:
        """What tells this memory from any other."""
        return self._mapping.handle

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "stream": None,
        }


_mapped: weakref.WeakValueDictionary[str, DeviceMemory] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def is_device_handle(handle: str) -> bool:
    """Whether a pool with this handle lies on a GPU."""
    return handle.startswith((VMM, CHUNKS, LEGACY))


def map_device_pool(
    socket_path: str, handle: str, pool: int, rank: int, num_pages: int, page_bytes: int
) -> DeviceMemory:
    """Map a pool of the manager on `socket_path`, or take the mapping that this process has of the same memory: after a
    restart of the manager, which takes its memory up again, addresses stay what they were.

    Raises:
        MemoryManagerGone: the manager is gone, or does not know the pool.
        DeviceMemoryError: the driver refused; says why and what to do.
    """
    with _lock:
        known = _mapped.get(handle)
        if known is not None:
            return known
        mapping: _native.CudaMapping | _native.ChunkMapping
        if handle.startswith(CHUNKS):
            mapping = _native.ChunkMapping(handle, socket_path, pool, rank)
        else:
            mapping = _whole(socket_path, handle, pool, rank)
        mapped = DeviceMemory(mapping, num_pages, page_bytes)
        _mapped[handle] = mapped
        return mapped


def _whole(socket_path: str, handle: str, pool: int, rank: int) -> _native.CudaMapping:
    descriptor = _native.pool_descriptor(socket_path, pool, rank) if handle.startswith(VMM) else -1
    return _native.CudaMapping(handle, descriptor)

"""States of sequences on the shared pool, mapped so that vLLM's kernels find each in one piece.

A kernel takes the states of a layer as an array over slots and the slot of each sequence. In the pool a state lies on
whatever pages were free. So each slot is a range of addresses of its own, onto which the pages of one sequence's state
are mapped when it comes, one after the other: both engines of a model see the same memory, and nothing is copied.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.kv_cache_interface import MambaSpec

from muxserve.engine.binding import current
from muxserve.engine.states import StateSlots, layer_bytes, pages_for
from muxserve.memory.view import ModelView

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
# From <sys/mman.h>; this version of Python has no names for them.
_MAYMOVE_FIXED, _NO_RESERVE = 3, 0x4000
_FAILED = ctypes.c_void_p(-1).value
_MOST_MAPPINGS = Path("/proc/sys/vm/max_map_count")
# What a process maps besides, at most: libraries, weights, threads.
_OTHER_MAPPINGS = 8192


class MappedStates(StateSlots):
    """Slots for the states of `sequences` sequences, of the layers in `specs`.

    Raises:
        ValueError: a state is larger than its blocks, a page is no multiple of the machine's, or the kernel allows too
            few mappings.
    """

    def __init__(self, specs: Mapping[str, MambaSpec], sequences: int) -> None:
        page_bytes = current().view.pool.shape[1]
        self._offsets: dict[str, tuple[int, int]] = {}
        end = 0
        for name, spec in specs.items():
            self._offsets[name] = end, spec.real_page_size_bytes
            end += layer_bytes(spec)
        pages = pages_for(end)
        super().__init__(sequences, pages)
        self._slot_bytes = pages * page_bytes
        if page_bytes % mmap.PAGESIZE:
            raise ValueError(f"pages of {page_bytes} bytes cannot hold states: they are no multiple of {mmap.PAGESIZE}")
        allowed = int(_MOST_MAPPINGS.read_text()) - _OTHER_MAPPINGS
        if pages * sequences > allowed:
            raise ValueError(
                f"the states of {sequences} sequences are {pages} pages each, and a process may map {allowed} pieces "
                f"of memory: set max_num_seqs to at most {allowed // pages}, or raise the kernel's vm.max_map_count"
            )
        # Reserved addresses; memory is behind them when a state is mapped.
        self._window = mmap.mmap(-1, self.count * self._slot_bytes, flags=mmap.MAP_PRIVATE | _NO_RESERVE)
        self._bytes = torch.frombuffer(self._window, dtype=torch.int8)

    def of_layers(self) -> dict[str, torch.Tensor]:
        """Int8[slots, 1, 1, bytes] of each layer, as vLLM wants to bind them."""
        return {
            name: self._bytes.as_strided((self.count, 1, 1, size), (self._slot_bytes, size, size, 1), offset)
            for name, (offset, size) in self._offsets.items()
        }

    def place(self, come: Mapping[int, npt.NDArray[np.int64]]) -> None:
        """Map the pages of each slot's state one after the other."""
        view = current().view
        for slot, pages in come.items():
            at = self._bytes.data_ptr() + slot * self._slot_bytes
            for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1):
                at += _map(view, int(run[0]), len(run), at)

    def copy(self, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64]) -> None:
        pool = current().view.pool
        for one, other in zip(source, target, strict=True):
            pool[other] = pool[one]


def _map(view: ModelView, page: int, count: int, at: int) -> int:
    """Map `count` pages of the pool, from `page` on, once more at the address `at`; how many bytes they are.

    Raises:
        OSError: the kernel refuses.
    """
    size = count * view.pool.shape[1]
    # For a shared mapping the length 0 means: let the old one be.
    if _libc.mremap(view.pool.ctypes.data + page * view.pool.shape[1], 0, size, _MAYMOVE_FIXED, at) == _FAILED:
        raise OSError(ctypes.get_errno(), "a sequence's state cannot be mapped")
    return size

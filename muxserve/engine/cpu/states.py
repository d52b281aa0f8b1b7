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
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import MambaSpec

from muxserve.engine.binding import current
from muxserve.engine.states import STATE_NEWS, StateNews, layer_bytes
from muxserve.memory.view import ModelView

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
# Of <sys/mman.h>; this version of Python has no names for them.
_MAYMOVE_FIXED, _NO_RESERVE = 3, 0x4000
_FAILED = ctypes.c_void_p(-1).value
_MOST_MAPPINGS = Path("/proc/sys/vm/max_map_count")
# What a process maps besides, at most: libraries, weights, threads.
_OTHER_MAPPINGS = 8192


class StateSlots:
    """Slots for the states of `sequences` sequences, of the layers in `specs`. Slot 0 belongs to nobody.

    Raises:
        ValueError: a state is larger than its blocks, a page is no multiple of the machine's, or the kernel allows too
            few mappings.
    """

    def __init__(self, specs: Mapping[str, MambaSpec], sequences: int) -> None:
        binding = current()
        model, page_bytes = binding.model, binding.view.pool.shape[1]
        self._offsets: dict[str, tuple[int, int]] = {}
        end = 0
        for name, spec in specs.items():
            self._offsets[name] = end, spec.real_page_size_bytes
            end += layer_bytes(spec)
        room = model.state_blocks * model.pages_per_block * page_bytes
        if end > room:
            raise ValueError(f"a sequence's state has {end} bytes, but its config.json promised {room} at most")
        # Not all of the last block.
        self._pages = pages = -(-end // page_bytes)
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
        self._window = mmap.mmap(-1, (sequences + 1) * self._slot_bytes, flags=mmap.MAP_PRIVATE | _NO_RESERVE)
        self._bytes = torch.frombuffer(self._window, dtype=torch.int8)
        self._free = list(range(sequences, 0, -1))
        self._slots: dict[str, int] = {}

    def of_layers(self) -> dict[str, torch.Tensor]:
        """Int8[slots, 1, 1, bytes] of each layer, as vLLM wants to bind them."""
        return {
            name: self._bytes.as_strided((len(self), 1, 1, size), (self._slot_bytes, size, size, 1), offset)
            for name, (offset, size) in self._offsets.items()
        }

    def __len__(self) -> int:
        return self._bytes.numel() // self._slot_bytes

    def follow(self, step: SchedulerOutput) -> None:
        """Give slots to the requests that come into the runner with this step, and take those of others that left it.
        vLLM is told the slot as the one block of the group of these layers."""
        news: StateNews = getattr(step, STATE_NEWS)
        blocks, held = news.blocks, news.held
        for request_id in [each for each in self._slots if each not in held]:
            self._free.append(self._slots.pop(request_id))
        for data in step.scheduled_new_reqs:
            data.block_ids = (*data.block_ids, [self._mapped(data.req_id, blocks[data.req_id])])
        known = step.scheduled_cached_reqs
        for index, (request_id, ids) in enumerate(zip(known.req_ids, known.new_block_ids, strict=True)):
            if ids is not None:
                back = [self._mapped(request_id, blocks[request_id])] if request_id in known.resumed_req_ids else []
                known.new_block_ids[index] = (*ids, back)

    def restore(self, step: SchedulerOutput) -> None:
        """Copy the snapshots behind which prompts begin with this step."""
        news: StateNews = getattr(step, STATE_NEWS)
        for snapshot, states in news.restored:
            _copy(self._snapshot_pages(snapshot), self._state_pages(states))

    def keep(self, step: SchedulerOutput) -> None:
        """Copy the states of which snapshots are kept, when the step is computed."""
        news: StateNews = getattr(step, STATE_NEWS)
        for states, snapshot in news.kept:
            _copy(self._state_pages(states), self._snapshot_pages(snapshot))

    def _state_pages(self, blocks: list[int]) -> np.ndarray:
        """The pages of a sequence's states, from their beginning to their end: in the order of their numbers, so that
        neighbours are one mapping."""
        return np.sort(_pages_of(blocks))[: self._pages]

    def _snapshot_pages(self, blocks: list[int]) -> np.ndarray:
        """The same of a snapshot: block by block, so that one of its blocks may be replaced by an equal one."""
        return _pages_of(blocks)[: self._pages]

    def forget(self) -> None:
        """Nothing that was mapped is there any more, and nobody has a slot."""
        self._slots.clear()
        self._free = list(range(len(self) - 1, 0, -1))

    def _mapped(self, request_id: str, blocks: list[int]) -> int:
        """The slot onto which the pages of `blocks` are mapped now."""
        slot = self._slots.get(request_id)
        if slot is None:
            slot = self._slots[request_id] = self._free.pop()
        view, pages = current().view, self._state_pages(blocks)
        at = self._bytes.data_ptr() + slot * self._slot_bytes
        for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1):
            at += _map(view, int(run[0]), len(run), at)
        return slot


def _pages_of(blocks: list[int]) -> np.ndarray:
    return current().view.page_table[blocks].reshape(-1).astype(np.int64)


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    pool = current().view.pool
    for one, other in zip(source, target, strict=True):
        pool[other] = pool[one]


def _map(view: ModelView, page: int, count: int, at: int) -> int:
    """Map `count` pages of the pool, from `page` on, once more at the address `at`; how many bytes they are.

    Raises:
        OSError: the kernel refuses.
    """
    size = count * view.pool.shape[1]
    # Of a shared mapping the length 0 stands for: let the old one be.
    if _libc.mremap(view.pool.ctypes.data + page * view.pool.shape[1], 0, size, _MAYMOVE_FIXED, at) == _FAILED:
        raise OSError(ctypes.get_errno(), "a sequence's state cannot be mapped")
    return size

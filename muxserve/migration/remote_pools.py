"""Memory managers of other units on this machine, whose pools are written to directly.

What is written to is held here too, beside the other unit's migrator: so whoever dies, no block goes to somebody else
while this process writes into it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from muxserve.memory import MemoryManagerError, MemoryManagerGone, _native
from muxserve.memory.client import MemoryClient
from muxserve.migration.pages import MakePages, Pages, of_all_ranks
from muxserve.migration.tasks import JoinPool

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 2.0
# Mappings are kept for the next move: the first access to each of their pages costs more than copying it.
KEEP_SECONDS = 60.0


@dataclass(slots=True)
class RemotePool:
    """One connection. `moves` are those under way, with model and blocks; `counters` tell whether the manager lives."""

    client: MemoryClient
    counters: _native.CountersView
    used_at: float
    pages: dict[str, list[Pages]] = field(default_factory=dict)
    moves: defaultdict[str, list[tuple[str, list[int]]]] = field(default_factory=lambda: defaultdict(list))

    @property
    def lives(self) -> bool:
        """Whether the manager is the one that was connected to."""
        return self.counters.generation == self.client.generation


class RemotePools:
    """All of them, used by the worker's thread only."""

    def __init__(self, name: str, ranks: int, make_pages: MakePages) -> None:
        self._name = name
        self._ranks = ranks
        self._make_pages = make_pages
        self._by_socket: dict[str, RemotePool] = {}
        self._of_move: dict[str, RemotePool] = {}

    def join(self, task: JoinPool) -> bool:
        """Hold the blocks of `task.key` as well; false if that memory cannot be reached from here.

        Raises:
            MemoryManagerError, MemoryManagerGone: it was reached, and the blocks are not there any more.
        """
        try:
            pool = self._reach(task)
        except (OSError, MemoryManagerError, RuntimeError, ValueError) as error:
            log.warning("%s cannot be written to directly: %s", task.memory_socket, error)
            return False
        if pool.client.generation != task.generation:
            raise MemoryManagerGone("the other unit's memory manager has started anew")
        known = self._of_move.get(task.move)
        if known is not None and known is not pool:
            raise MemoryManagerGone("the other unit's memory manager has started anew")
        blocks = pool.client.adopt(task.model, task.key).tolist()
        pool.moves[task.move].append((task.model, blocks))
        self._of_move[task.move] = pool
        if blocks != list(task.blocks):
            raise MemoryManagerError("INVALID", "the other migrator names other blocks than it shares")
        return True

    @contextmanager
    def writing(self, move: str, model: str) -> Iterator[list[Pages]]:
        """The model's pages on each rank, for writing into the pool joined for `move`.

        Raises:
            MemoryManagerGone: nothing was joined, or the memory manager over there has died.
        """
        pool = self._of_move.get(move)
        if pool is None:
            raise MemoryManagerGone("the other unit's memory manager is gone")
        with pool.client.writing():
            yield pool.pages[model]

    def leave(self, move: str) -> None:
        """Let go of the pool joined for `move`."""
        pool = self._of_move.pop(move, None)
        if pool is None:
            return
        with contextlib.suppress(MemoryManagerGone, MemoryManagerError):  # then it is not held any more
            for model, blocks in pool.moves.pop(move):
                pool.client.step(model, release=np.array(blocks, dtype=np.int32))

    def tidy(self) -> None:
        """Close connections that have not been used for a while, and let go of the memory of managers that are gone."""
        now = time.monotonic()
        for socket, pool in list(self._by_socket.items()):
            if not pool.moves and (not pool.lives or now - pool.used_at > KEEP_SECONDS):
                pool.client.close()
                del self._by_socket[socket]

    def close(self) -> None:
        """Let go of everything."""
        for pool in self._by_socket.values():
            pool.client.close()
        self._by_socket.clear()
        self._of_move.clear()

    def _reach(self, task: JoinPool) -> RemotePool:
        known = self._by_socket.get(task.memory_socket)
        if known is not None and not known.lives:
            # What was held in that life of the manager is gone.
            known.client.close()
            known = None
        if known is None:
            client = MemoryClient(task.memory_socket, self._name, TIMEOUT_SECONDS)
            counters = client.map(task.model).counters
            known = self._by_socket[task.memory_socket] = RemotePool(client, counters, 0.0)
        if task.model not in known.pages:
            known.pages[task.model] = of_all_ranks(known.client, task.model, self._ranks, self._make_pages)
        known.used_at = time.monotonic()
        return known

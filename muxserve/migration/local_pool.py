"""This unit's memory manager, as the migrator holds blocks of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from muxserve.memory import MemoryManagerError, MemoryManagerGone
from muxserve.memory.client import MemoryClient
from muxserve.migration.pages import MakePages, Pages, of_all_ranks
from muxserve.spec import UnitSpec

log = logging.getLogger(__name__)

CLIENT_NAME = "migrator"
TIMEOUT_SECONDS = 2.0


class LocalPool:
    """Implements `incoming.Store`. Blocks are reserved and released by the thread of the loop; pages are read and
    written by the worker, which asks for them by the life that granted them."""

    def __init__(self, unit_spec: UnitSpec, make_pages: MakePages) -> None:
        self.life = 0
        self.socket = unit_spec.memory_socket
        self._unit_spec = unit_spec
        self._make_pages = make_pages
        self._client: MemoryClient | None = None
        self._said = ""
        self._pages: dict[str, list[Pages]] = {}

    # ------------------------------------------------------------ the thread of the loop

    def connect(self) -> bool:
        """Try to reach the memory manager; whether it worked."""
        if self._client is not None:
            return True
        try:
            client = MemoryClient(self.socket, CLIENT_NAME, TIMEOUT_SECONDS)
            pages = {
                model.name: of_all_ranks(client, model.name, self._unit_spec.ranks, self._make_pages)
                for model in self._unit_spec.models
            }
            self._counters = client.map(self._unit_spec.models[0].name).counters
        except OSError as error:
            log.debug("no memory manager yet: %s", error)
            return False
        except (MemoryManagerError, RuntimeError, ValueError) as error:
            # A GPU, as a rule; tried again, but said once.
            if str(error) != self._said:
                self._said = str(error)
                log.error("the memory manager's pools cannot be used, so nothing moves here: %s", error)
            return False
        self._client, self._pages, self.life = client, pages, client.generation
        log.info("bound to the memory manager, life %x", self.life)
        return True

    def look(self) -> bool:
        """Whether the memory manager is still the same, without a word to it; if not, forget it."""
        if self._client is None:
            return False
        if self._counters.generation == self.life:
            return True
        log.warning("the memory manager is gone")
        self._forget()
        return False

    def close(self) -> None:
        """Let go of everything."""
        self._forget()

    def reserve(self, model: str, count: int) -> list[int]:
        """See `incoming.Store`."""
        with self._asking() as client:
            return [int(block) for block in client.step(model, reserve=count).reserved]

    def share(self, model: str, key: str, blocks: Sequence[int], seconds: float) -> None:
        """See `incoming.Store`."""
        with self._asking() as client:
            client.hand_off(model, key, list(blocks), seconds, release=[])

    def hand_off(self, model: str, key: str, blocks: Sequence[int], extra: Sequence[int], seconds: float) -> None:
        """See `incoming.Store`."""
        with self._asking() as client:
            client.hand_off(model, key, list(blocks), seconds, release=[*blocks, *extra])

    def release(self, model: str, blocks: Sequence[int]) -> None:
        """See `incoming.Store`."""
        with self._asking() as client:
            client.step(model, release=np.array(blocks, dtype=np.int32))

    def drop(self, model: str, key: str) -> None:
        """See `incoming.Store`."""
        with self._asking() as client:
            try:
                client.drop(model, key)
            except MemoryManagerError as error:
                if error.code != "UNKNOWN_KEY":
                    raise

    @contextmanager
    def _asking(self) -> Iterator[MemoryClient]:
        if self._client is None:
            raise MemoryManagerGone("the memory manager is gone")
        try:
            yield self._client
        except MemoryManagerGone:
            log.warning("the memory manager is gone")
            self._forget()
            raise

    def _forget(self) -> None:
        if self._client is not None:
            self._client.close()
        # The pages stay with who has them: reading them then does no harm.
        self._client, self._pages, self.life = None, {}, 0

    # ------------------------------------------------------------ the worker's thread

    def pages(self, model: str) -> list[Pages]:
        """The model's pages on each rank, for reading.

        Raises:
            MemoryManagerGone: at present there is none.
        """
        pages = self._pages.get(model)
        if pages is None:
            raise MemoryManagerGone("the memory manager is gone")
        return pages

    @contextmanager
    def writing(self, model: str, life: int) -> Iterator[list[Pages]]:
        """The same for writing into blocks that the memory manager granted in that life.

        Raises:
            MemoryManagerGone: that life is over.
        """
        client, pages = self._client, self._pages.get(model)
        if client is None or pages is None or client.generation != life:
            raise MemoryManagerGone("the memory manager that granted the blocks has died")
        with client.writing():
            yield pages

"""The unit scheduler's line to the memory manager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from muxserve.scheduling.ledger import UnitLedger
from muxserve.spec import UnitSpec

log = logging.getLogger(__name__)

TIMEOUT_SECONDS = 2.0


class Memory(Protocol):
    """What the unit scheduler asks of the memory manager. Nothing here raises when the manager is gone; `connected`
    turns false instead."""

    connected: bool

    def connect(self) -> bool:
        """Try to connect; whether it worked."""

    def alive(self) -> bool:
        """Ask the manager for a sign of life."""

    def join(self, unit_spec: UnitSpec) -> None:
        """The models are those of `unit_spec` from now on; the manager has them."""

    def hand_offs(self) -> dict[str, list[str]] | None:
        """Keys of the hand-offs that wait in the manager, by model; None if it is gone."""

    def read(self, ledger: UnitLedger) -> None:
        """Bring the ledger's page counts up to date."""

    def set_quotas(self, quotas: Mapping[str, int]) -> bool:
        """Set quotas (pages) together; whether the manager took them."""

    def set_room(self, pages: Mapping[str, int]) -> bool:
        """Set how many pages of each pool may be in use; whether the manager took that."""

    def drop(self, model: str, key: str) -> None:
        """Give up the hand-off `key`, if there is one."""


def _connect(socket: str) -> Any:
    # Imported here because numpy, which the client needs, takes longer to load than everything else of this process.
    from muxserve.memory.client import MemoryClient

    return MemoryClient(socket, "unit", TIMEOUT_SECONDS)


class MemoryLink:
    """`Memory` over a `MemoryClient`; counts are read from shared memory, without asking anybody."""

    def __init__(self, unit_spec: UnitSpec, connect: Callable[[str], Any] = _connect) -> None:
        self.connected = False
        self._socket = unit_spec.memory_socket
        self._models = [(model.name, model.pool) for model in unit_spec.models]
        self._connect = connect
        self._client: Any = None
        self._counters: list[tuple[str, str, Any]] = []

    def connect(self) -> bool:
        try:
            client = self._connect(self._socket)
            self._map(client)
        except OSError:
            return False
        except Exception as error:  # refused: worth a word, and worth another try
            log.warning("the memory manager does not take this unit: %s", error)
            return False
        self._client, self.connected = client, True
        log.info("connected to the memory manager")
        return True

    def join(self, unit_spec: UnitSpec) -> None:
        self._models = [(model.name, model.pool) for model in unit_spec.models]
        self._ask(self._map)

    def alive(self) -> bool:
        return self._ask(lambda client: client.stats())

    def hand_offs(self) -> dict[str, list[str]] | None:
        found: dict[str, list[str]] = {}

        def read(client: Any) -> None:
            found.update({model["name"]: model["hand_off_keys"] for model in client.stats()["models"]})

        return found if self._ask(read) else None

    def read(self, ledger: UnitLedger) -> None:
        for name, _, counters in self._counters:
            ledger.pages(name, counters.used_pages, counters.cached_pages, counters.quota_pages)
        seen = ""
        for _, pool, counters in self._counters:
            if pool != seen:
                # The null page is nobody's.
                room, backed = counters.room_pages - 1, counters.backed_pages
                ledger.pool_pages(pool, counters.free_pages, counters.pool_cached_pages, room, backed)
                seen = pool

    def set_quotas(self, quotas: Mapping[str, int]) -> bool:
        return self._ask(lambda client: client.set_quotas(dict(quotas)))

    def set_room(self, pages: Mapping[str, int]) -> bool:
        def ask(client: Any) -> None:
            for pool, count in pages.items():
                client.set_room(pool, count)

        return self._ask(ask)

    def drop(self, model: str, key: str) -> None:
        self._ask(lambda client: client.drop(model, key), expected="UNKNOWN_KEY")

    def _map(self, client: Any) -> None:
        self._counters = [(name, pool, client.map(name).counters) for name, pool in self._models]

    def close(self) -> None:
        """End the connection."""
        if self._client is not None:
            self._client.close()
        self._client, self.connected = None, False

    def _ask(self, question: Callable[[Any], object], expected: str = "") -> bool:
        """Whether the manager did what was asked. One that is gone is forgotten."""
        if not self.connected:
            return False
        try:
            question(self._client)
        except OSError as error:
            log.warning("the memory manager is gone: %s", error)
            self.close()
            return False
        except Exception as error:
            if getattr(error, "code", "") != expected:
                log.warning("the memory manager refused: %s", error)
            return False
        return True

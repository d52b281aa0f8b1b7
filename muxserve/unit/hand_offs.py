"""Blocks that wait in the memory manager for the engine that decodes: those of requests that come to nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping

from muxserve.scheduling.state import ModelState
from muxserve.unit.memory import Memory
from muxserve.unit.request_table import RequestEntry

log = logging.getLogger(__name__)

# What a migrator leaves for another one to hold as well: MOVE/NUMBER. It has a short time limit of its own.
_SHARED = re.compile(r"[^:]+:[0-9a-f]+:\d+/\d+")


class HandOffs:
    """Gives up hand-offs that nobody will adopt.

    Args:
        held: the live requests, which know the keys of theirs.
    """

    def __init__(self, held: Mapping[str, RequestEntry], memory: Memory) -> None:
        self._held = held
        self._memory = memory
        self._orphans: set[tuple[str, str]] = set()

    def give_up(self, request_ids: Iterable[str], model: ModelState) -> None:
        """Of requests that are about to be lost: a decode engine may have died before it adopted them."""
        for request_id in request_ids:
            held = self._held.get(request_id)
            if held is not None and held.key:
                self._memory.drop(model.name, held.key)

    def drop_orphans(self, waiting: Mapping[str, Iterable[str]]) -> None:
        """Give up hand-offs (keys by model) that no request here knows.

        An engine that dies between handing over and saying so leaves one, and so does a unit scheduler that dies. What
        is met for the first time may be on its way, so it goes only when it is still unknown at the next look.
        """
        known = {held.key for held in self._held.values()}
        unknown = {
            (model, key)
            for model, keys in waiting.items()
            for key in keys
            if key not in known and not _SHARED.fullmatch(key)
        }
        for model, key in unknown & self._orphans:
            log.warning("giving up the hand-off %s of %s, which no request waits for", key, model)
            self._memory.drop(model, key)
        self._orphans = unknown

    def void(self, request_ids: Iterable[str]) -> None:
        """The memory manager died, and these hand-offs with it."""
        for request_id in request_ids:
            self._held[request_id].key = ""

"""The unit scheduler's dealings with the memory manager: its life and death, quotas, hand-offs that nobody claims."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping

from muxserve.scheduling.pool_room import divided, divided_anew
from muxserve.scheduling.quotas import quota_when_back
from muxserve.scheduling.state import ModelState
from muxserve.unit.moving import Departures
from muxserve.unit.request_table import UnitRequestTable
from muxserve.unit.state import UnitState

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.05
CHECK_SECONDS = 1.0
# Between two divisions of the same room among pools: vacated chunks are given back meanwhile.
DIVIDE_SECONDS = 0.1
# What a migrator leaves for another one to hold as well: MOVE/NUMBER. It has a short time limit of its own.
_SHARED = re.compile(r"[^:]+:[0-9a-f]+:\d+/\d+")


class PageQuotas:
    """Keeps the ledger's counts and the manager's quotas in line."""

    def __init__(self, state: UnitState, table: UnitRequestTable, moving: Departures) -> None:
        self.due = state.started
        self._state = state
        self._table = table
        self._moving = moving
        self._quotas: dict[str, int] | None = None
        self._divides_from = state.started
        self._orphans: set[tuple[str, str]] = set()

    def tick(self, now: float) -> None:
        """Look after the manager, read its counts, and change quotas if the policy wants to."""
        if now >= self.due or not self._state.memory.connected:
            self._mind(now)
        if self._state.memory.connected:
            self._state.memory.read(self._state.ledger)

    def rebalance(self, now: float) -> None:
        """Change quotas if the policy wants to, and the room of each pool if what waits wants another division."""
        state = self._state
        may_divide = state.room and state.memory.connected and now >= self._divides_from
        if may_divide and divided_anew(state.ledger, state.room, state.ranks) is not None:
            self._divides_from = now + DIVIDE_SECONDS
            self._make_room()
        changes = self._state.policy.rebalance(self._state.ledger, now)
        if changes:
            self._set({change.model: change.pages for change in changes})

    def retire(self, model: ModelState) -> None:
        """A model gives its quota away. What it still holds comes free as its requests end."""
        model.retired = True
        self._set({model.name: 0})

    def revive(self, model: ModelState) -> None:
        """A model gets its quota back."""
        model.retired = False
        self._set({model.name: quota_when_back(model)})

    def plan(self) -> None:
        """Begin with the quotas that the unit's models are planned with."""
        models = self._state.ledger.models
        self._set({model.name: 0 if model.retired else model.profile.quota_pages for model in models})

    def set_room(self, size: int) -> None:
        """The pools may take `size` bytes together."""
        self._state.room = size
        if self._state.memory.connected:
            self._make_room()

    def _make_room(self) -> None:
        pages = divided(self._state.ledger, self._state.room, self._state.ranks)
        self._state.memory.set_room({name: count + 1 for name, count in pages.items()})  # with the null page
        self._state.memory.read(self._state.ledger)

    def gone(self, now: float) -> None:
        """The manager died, and its hand-offs with it. What is in engines, the engines report themselves."""
        self._state.ledger.memory_up = False
        self.due = now
        handed = [request_id for model in self._state.ledger.models for request_id in model.handed]
        on_their_way = self._moving.memory_gone(now)
        self._table.void_hand_offs([*handed, *(r for m in self._state.ledger.models for r in m.moving)])
        self._table.tell_lost(self._state.ledger.lost([*handed, *on_their_way], now), "the memory manager died")

    def _mind(self, now: float) -> None:
        memory, ledger = self._state.memory, self._state.ledger
        if memory.connected and now >= self.due:
            waiting = memory.hand_offs()
            if waiting is not None:
                self._drop_orphans(waiting)
        if ledger.memory_up and not memory.connected:
            self.gone(now)
        if not memory.connected:
            if now < self.due:
                return
            if memory.connect():
                ledger.memory_up = True
                # A manager that was started again has forgotten how far quotas had moved. One that this unit scheduler
                # meets first has them from an earlier one, or from the unit's spec.
                if self._quotas is not None:
                    memory.set_quotas(self._quotas)
                if self._state.room:
                    self._make_room()
            else:
                self.due = now + RETRY_SECONDS
                return
        self.due = now + CHECK_SECONDS

    def _set(self, wanted: dict[str, int]) -> None:
        if self._state.memory.set_quotas(wanted):
            log.debug("quotas: %s", wanted)
            self._state.memory.read(self._state.ledger)
            self._quotas = {model.name: model.quota for model in self._state.ledger.models} | wanted

    def _drop_orphans(self, waiting: Mapping[str, Iterable[str]]) -> None:
        """Give up hand-offs (keys by model) that no request here knows.

        An engine that dies between handing over and saying so leaves one, and so does a unit scheduler that dies. What
        is met for the first time may be on its way, so it goes only when it is still unknown at the next look.
        """
        known = {held.hand_off.key for held in self._table.held.values() if held.hand_off is not None}
        unknown = {
            (model, key)
            for model, keys in waiting.items()
            for key in keys
            if key not in known and not _SHARED.fullmatch(key)
        }
        for model, key in unknown & self._orphans:
            log.warning("giving up the hand-off %s of %s, which no request waits for", key, model)
            self._state.memory.drop(model, key)
        self._orphans = unknown

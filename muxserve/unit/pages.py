"""The unit scheduler's dealings with the memory manager: its life and death, quotas, hand-offs that nobody claims."""

from __future__ import annotations

import logging

from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policy import Policy
from muxserve.scheduling.state import ModelState
from muxserve.unit.hand_offs import HandOffs
from muxserve.unit.memory import Memory
from muxserve.unit.moving import Departures
from muxserve.unit.request_table import UnitRequestTable

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.05
CHECK_SECONDS = 1.0


class Pages:
    """Keeps the ledger's counts and the manager's quotas in line."""

    def __init__(
        self,
        ledger: UnitLedger,
        policy: Policy,
        memory: Memory,
        request_table: UnitRequestTable,
        hand_offs: HandOffs,
        moving: Departures,
        now: float,
    ) -> None:
        self.due = now
        self._ledger = ledger
        self._policy = policy
        self._memory = memory
        self._request_table = request_table
        self._hand_offs = hand_offs
        self._moving = moving
        self._quotas: dict[str, int] | None = None

    def turn(self, now: float) -> None:
        """Look after the manager, read its counts, and change quotas if the policy wants to."""
        if now >= self.due or not self._memory.connected:
            self._mind(now)
        if self._memory.connected:
            self._memory.read(self._ledger)

    def rebalance(self, now: float) -> None:
        """Change quotas if the policy wants to."""
        changes = self._policy.rebalance(self._ledger, now)
        if changes:
            self._set({change.model: change.pages for change in changes})

    def retire(self, model: ModelState) -> None:
        """A model gives its quota away. What it still holds comes free as its requests end."""
        model.retired = True
        self._set({model.name: 0})

    def revive(self, model: ModelState) -> None:
        """A model gets its quota back, as far as others have not been given it; from them it comes by and by."""
        model.retired = False
        others = sum(other.quota for other in model.pool.models if other is not model)
        spare = model.pool.profile.pages - others
        self._set({model.name: max(model.quota, min(model.profile.quota_pages, spare))})

    def gone(self, now: float) -> None:
        """The manager died, and its hand-offs with it. What is in engines, the engines report themselves."""
        self._ledger.memory_up = False
        self.due = now
        handed = [request_id for model in self._ledger.models for request_id in model.handed]
        on_their_way = self._moving.memory_gone(now)
        self._hand_offs.void([*handed, *(r for m in self._ledger.models for r in m.moving)])
        self._request_table.tell_lost(self._ledger.lost([*handed, *on_their_way], now), "the memory manager died")

    def _mind(self, now: float) -> None:
        memory, ledger = self._memory, self._ledger
        if memory.connected and now >= self.due:
            waiting = memory.hand_offs()
            if waiting is not None:
                self._hand_offs.drop_orphans(waiting)
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
            else:
                self.due = now + RETRY_SECONDS
                return
        self.due = now + CHECK_SECONDS

    def _set(self, wanted: dict[str, int]) -> None:
        if self._memory.set_quotas(wanted):
            log.debug("quotas: %s", wanted)
            self._memory.read(self._ledger)
            self._quotas = {model.name: model.quota for model in self._ledger.models} | wanted

"""Models that cannot be served for now: their engines fail at each start, and are tried again ever more rarely.

Whoever would wait for them is told so: requests that have not begun are given back, and the gateways know the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple

from muxserve.scheduling.state import ModelState
from muxserve.unit.request_table import UnitRequestTable
from muxserve.unit.state import UnitState
from muxserve.wire import Degraded

log = logging.getLogger(__name__)


class Trouble(NamedTuple):
    """Why a model cannot be served, and when it is tried again."""

    reason: str
    due: float


class DegradedModels:
    """Those of one unit."""

    def __init__(self, state: UnitState, table: UnitRequestTable) -> None:
        self._state = state
        self._table = table
        self._models: dict[str, Trouble] = {}

    @property
    def reasons(self) -> Mapping[str, str]:
        """By model."""
        return {name: trouble.reason for name, trouble in self._models.items()}

    def told(self, message: Degraded, now: float) -> None:
        """The host says how a model fails."""
        model = self._state.ledger.by_name.get(message.model)
        if model is None:
            log.warning("%r is no model of this unit", message.model)
            return
        log.warning("%s is degraded, and tried again in %g s: %s", model.name, message.retry_in, message.reason)
        self._models[model.name] = Trouble(message.reason, now + message.retry_in)
        self._tell(message)

    def greeted(self, gateway: bytes, now: float) -> None:
        """A gateway must know as well."""
        for name, trouble in self._models.items():
            self._state.send(gateway, Degraded(name, trouble.reason, max(0.0, trouble.due - now)))

    def tick(self, now: float) -> None:
        """See who is up again, and give back what waits for the others."""
        for name in list(self._models):
            model = self._state.ledger.by_name[name]
            if model.up or model.retired:
                del self._models[name]
                log.info("%s is no longer degraded", name)
                self._tell(Degraded(name, ""))
            else:
                self._give_back(model, self._models[name], now)

    def _give_back(self, model: ModelState, trouble: Trouble, now: float) -> None:
        if model.queue:
            self._table.give_back(model, now)
        if model.handed and not model.decode.up:
            waiting = [*model.handed]
            self._table.give_up_hand_offs(waiting, model)
            self._table.tell_lost(self._state.ledger.lost(waiting, now), trouble.reason)

    def _tell(self, message: Degraded) -> None:
        for gateway in self._table.gateways:
            self._state.send(gateway, message)

"""What the unit tells the global scheduler, and what it hears from it and from the controller about its replicas."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from muxserve.replicas.priorities import Levels
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policy import Policy
from muxserve.scheduling.state import ModelState
from muxserve.spec import UnitSpec
from muxserve.unit.loads import load_of, worth_telling
from muxserve.unit.outbox import Outbox
from muxserve.unit.request_table import UnitRequestTable
from muxserve.unit.rolling import RollingReports
from muxserve.wire import Load, Loads, MovingIn, SchedulerHello, Terminating

log = logging.getLogger(__name__)

# Changes within this time are told together; without any, the global scheduler hears that the unit lives.
REPORT_SECONDS = 0.02
SILENCE_SECONDS = 1.0


class Replicas:
    """The unit's models as replicas.

    Args:
        moving_out: how many requests of that model are on their way to other units.
    """

    def __init__(
        self,
        unit_spec: UnitSpec,
        ledger: UnitLedger,
        policy: Policy,
        request_table: UnitRequestTable,
        out: Outbox,
        epoch: str,
        moving_out: Callable[[str], int],
    ) -> None:
        self.levels: Levels = unit_spec.priority_levels()
        self.terminating: set[str] = set()
        self.moving_in: dict[str, int] = {}
        self._unit = unit_spec.unit
        self._layouts = {model.name: unit_spec.layout(model.name) for model in unit_spec.models}
        self._ledger = ledger
        self._policy = policy
        self._request_table = request_table
        self._out = out
        self._epoch = epoch
        self._moving_out = moving_out
        self._rolling = RollingReports(unit_spec, ledger, out, epoch)
        self._scheduler: bytes | None = None
        self._told: list[Load] = []
        self._told_at = -math.inf
        self._due = math.inf

    def greeted(self, peer: bytes, hello: SchedulerHello, now: float) -> None:
        """A global scheduler is there; there is one, so that an earlier one is gone."""
        log.info("global scheduler %s", hello.epoch)
        self._scheduler = peer
        self._rolling.greeted(peer)
        self._rolling.turn(now)
        self._tell(self.loads(), now)

    def migrating(self, message: MovingIn) -> None:
        """The migrator says what is on its way in."""
        self.moving_in = dict(message.moves)

    def migrator_new(self) -> None:
        """What was on its way in is not any more."""
        self.moving_in = {}

    def drain(self, message: Terminating, now: float) -> None:
        """A replica is, or is no longer, being drained; what waits is given back."""
        model = self._ledger.by_name.get(message.model)
        if model is None:
            log.warning("%r, which is to be drained, is no model of this unit", message.model)
        elif message.on:
            self.terminating.add(model.name)
            self._request_table.give_back(model, now)
        else:
            self.terminating.discard(model.name)

    def load(self, model: ModelState) -> Load:
        """How the replica stands now."""
        name = model.name
        return load_of(
            model,
            self._policy,
            self._layouts[name],
            name in self.terminating,
            self.moving_in.get(name, 0),
            self._moving_out(name),
        )

    def loads(self) -> list[Load]:
        """How all replicas stand that can serve."""
        if not self._ledger.memory_up:
            return []
        return [self.load(model) for model in self._ledger.models if model.up and not model.retired]

    def turn(self, now: float) -> None:
        """Report if there is something to report."""
        whole = self._rolling.turn(now)
        if self._scheduler is None:
            return
        if whole:
            self._tell(self.loads(), now)
            return
        if now < self._told_at + REPORT_SECONDS:
            self._due = self._told_at + REPORT_SECONDS
            return
        self._due = self._told_at + SILENCE_SECONDS
        loads = self.loads()
        if now >= self._due or worth_telling(self._told, loads):
            self._tell(loads, now)

    def wakeup(self) -> float:
        """When `turn` is due although no message came."""
        return min(self._due, self._rolling.wakeup())

    def _tell(self, loads: list[Load], now: float) -> None:
        assert self._scheduler is not None
        self._out.send(self._scheduler, Loads(self._unit, self._epoch, loads))
        self._told, self._told_at, self._due = loads, now, now + SILENCE_SECONDS

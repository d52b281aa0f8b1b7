"""Messages in, messages out: carries out what the policy decides.

No socket and no clock: `handle` takes a message and the time, `turn` returns what is to be sent. The one thing asked in
between is the memory manager, behind `Memory`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from muxserve import wire
from muxserve.net.inbox import ImpossibleMessageError
from muxserve.net.server import shown
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policies import make_policy
from muxserve.scheduling.policy import AGAIN_SECONDS, Policy
from muxserve.spec import UnitSpec
from muxserve.unit.degraded import DegradedModels
from muxserve.unit.engines import EngineTable
from muxserve.unit.memory import Memory
from muxserve.unit.moving import MIGRATOR, Departures
from muxserve.unit.pages import PageQuotas
from muxserve.unit.replicas import UnitReplicas
from muxserve.unit.report import unit_state
from muxserve.unit.request_table import UnitRequestTable
from muxserve.unit.state import UnitState
from muxserve.wire import (
    Blocks,
    Cancel,
    Degraded,
    Detached,
    EngineDown,
    EngineHello,
    EngineLost,
    EngineSuspect,
    GatewayDown,
    GatewayHello,
    HeldRequests,
    Joined,
    Message,
    MigratorHello,
    MoveCommitted,
    MoveFailed,
    MoveStaged,
    MovingIn,
    Paired,
    Reset,
    Retire,
    Revive,
    SchedulerHello,
    SetRoom,
    StateRequest,
    StepFailed,
    StepReport,
    Submit,
    TakenOver,
    TakeOver,
    Terminating,
    TimelineRequest,
    Unpaired,
)

log = logging.getLogger(__name__)


class UnitExecutor:
    """The unit scheduler without its sockets.

    Args:
        epoch: new for each process; gateways and engines tell by it that the queues are lost.
        now: seconds of the machine's monotonic clock.
        gpus: tells the state of the unit's GPUs, for those who cannot ask for it themselves.
        planned: reads the unit's spec anew.

    Raises:
        ValueError: the unit's spec contradicts itself, or the policy is not made for it.
    """

    def __init__(
        self,
        unit_spec: UnitSpec,
        policy: Policy,
        memory: Memory,
        epoch: str,
        now: float,
        gpus: Callable[[], list[dict[str, object]]] | None = None,
        planned: Callable[[], UnitSpec] | None = None,
    ) -> None:
        self._state = state = UnitState(unit_spec, policy, memory, epoch, now)
        self.epoch = epoch
        self._gpus = gpus
        self._planned = planned
        self.request_table = UnitRequestTable(state)
        self.replicas = UnitReplicas(state, self.request_table)
        self.moving = Departures(state, self.request_table)
        self.degraded = DegradedModels(state, self.request_table)
        self._pages = PageQuotas(state, self.request_table, self.moving)
        self.engines = EngineTable(state, self.request_table, self._pages)

    @property
    def ledger(self) -> UnitLedger:
        """The unit's ledger."""
        return self._state.ledger

    # ------------------------------------------------------------ the two sides

    def handle(self, peer: bytes, message: Message, now: float) -> None:
        """Take in a message of the peer with that ZeroMQ identity."""
        self._state.now = now
        match message:
            case StepReport():
                self.engines.reported(peer, message, now)
            case Submit():
                self.request_table.submit(peer, message, now)
            case Cancel():
                self.request_table.cancel(peer, message, now)
            case GatewayHello():
                self.request_table.greeted(peer, message, now)
                if peer in self.request_table.gateways:
                    self.degraded.greeted(peer, now)
            case EngineHello():
                self.engines.hello(peer, message, now)
            case EngineLost():
                self.engines.lost(peer, message, now)
            case StepFailed():
                self.engines.step_failed(peer, message, now)
            case EngineDown():
                self.engines.down(message, now)
            case EngineSuspect():
                self.engines.suspect(message)
            case HeldRequests():
                self.engines.held(peer, message, now)
            case Degraded():
                self.degraded.told(message, now)
            case GatewayDown():
                log.warning("the controller says that gateway %d died", message.gateway)
                self.request_table.gateway_down(message.gateway, message.pid, now)
            case StateRequest():
                self._state.send(peer, wire.StateReply(self.state(now)))
            case TimelineRequest():
                self._state.send(peer, self._state.timeline.since(self.epoch, message.since, now))
            case MoveStaged() | MoveCommitted() | MoveFailed() | TakeOver() | MovingIn() if peer != MIGRATOR:
                raise ImpossibleMessageError("it is not the unit's migrator")
            case Blocks() | Detached() | MoveStaged() | MoveCommitted() | MoveFailed():
                self.moving.heard(peer, message, now)
            case TakeOver():
                self._state.send(peer, TakenOver(message.move, self.request_table.take_over(message, now)))
            case MovingIn():
                self.replicas.migrating(message)
            case Paired():
                self.moving.pairs.paired(message, now)
            case Unpaired():
                self.moving.pairs.unpaired(message.model)
            case Terminating():
                self.replicas.drain(message, now)
            case SetRoom():
                self._pages.set_room(message.bytes)
            case SchedulerHello():
                self.replicas.greeted(peer, message, now)
            case MigratorHello():
                self._migrator_hello(peer, message, now)
            case Joined():
                self._joined()
            case Retire() | Revive():
                self._retire(message, now)
            case _:
                raise ImpossibleMessageError("a unit scheduler has no use for it")

    def tick(self, now: float) -> list[tuple[bytes, Message]]:
        """Decide on what has been heard; returns messages and whom to send them to, in order."""
        self._state.now = now
        self._pages.tick(now)
        self.engines.tick(now)
        self.degraded.tick(now)
        self.moving.tick(now)
        self._pages.rebalance(now)
        self.engines.grant(self._state.policy.decide(self._state.ledger, now), now)
        self.replicas.tick(now)
        return self._state.take_messages()

    def wakeup(self, now: float) -> float:
        """When `tick` is due although no message came."""
        decide = self._state.policy.wakeup(self._state.ledger, now)
        return min(
            self._pages.due,
            decide if decide > now else now + AGAIN_SECONDS,
            self.moving.wakeup(),
            self.replicas.wakeup(),
            self.engines.wakeup(),
        )

    def state(self, now: float) -> dict[str, object]:
        """The unit as JSON-ready data."""
        if self._state.memory.connected:
            self._state.memory.read(self._state.ledger)
        gpus = {} if self._gpus is None else {"gpus": self._gpus()}
        reasons = self.degraded.reasons
        return gpus | unit_state(self._state, self.request_table, self.moving, self.engines, reasons, now)

    def _migrator_hello(self, peer: bytes, hello: MigratorHello, now: float) -> None:
        if peer != MIGRATOR:
            log.warning("%s is no migrator", shown(peer))
            return
        log.info("the migrator is up, pid %d", hello.pid)
        self.moving.migrator_new(now)
        self.replicas.migrator_new()
        self._state.send(peer, Reset(self._state.epoch))

    def _joined(self) -> None:
        assert self._planned is not None, "only the controller of a unit says so, and its spec is in a file"
        unit_spec = self._planned()
        new = self._state.join(unit_spec, make_policy(unit_spec.policy, unit_spec.share_steps))
        self.engines.add(new)
        self.engines.costs.join(unit_spec)
        self._pages.plan()
        log.info("%s joined the unit", ", ".join(model.name for model in new) or "no model")

    def _retire(self, message: Retire | Revive, now: float) -> None:
        model = self._state.ledger.by_name.get(message.model)
        if model is None:
            log.warning("%r is no model of this unit", message.model)
        elif isinstance(message, Retire):
            log.info("%s is taken out of service", model.name)
            self.request_table.give_all_back(model, now)
            self._pages.retire(model)
        else:
            log.info("%s is put back into service", model.name)
            self._state.terminating.discard(model.name)
            self._pages.revive(model)

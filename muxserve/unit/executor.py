"""Messages in, messages out: carries out what the policy decides.

No socket and no clock: `handle` takes a message and the time, `turn` returns what is to be sent. The one thing asked in
between is the memory manager, behind `Memory`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from muxserve.deployment import Deployment
from muxserve.scheduling.engines import EngineState
from muxserve.scheduling.policy import Policy
from muxserve.scheduling.state import ModelState
from muxserve.scheduling.types import Grant
from muxserve.unit.desk import Outbox, RequestDesk, shown
from muxserve.unit.memory import Memory
from muxserve.unit.moving import MIGRATOR, Departures
from muxserve.unit.pages import Pages
from muxserve.unit.profiles import unit_ledger
from muxserve.unit.replicas import Replicas
from muxserve.unit.report import unit_state
from muxserve.wire import (
    Blocks,
    Cancel,
    Detached,
    EngineDown,
    EngineHello,
    EngineLost,
    GatewayDown,
    GatewayHello,
    Lease,
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
    StateRequest,
    StepReport,
    Submit,
    TakenOver,
    TakeOver,
    Terminating,
    UnitState,
    Unpaired,
)

log = logging.getLogger(__name__)

ENGINE_CHECK_SECONDS = 0.05
SILENCE_SECONDS = 0.25
EMPTY_SECONDS = 1.0
HUNG_SECONDS = 10.0


@dataclass(slots=True)
class Peer:
    """What is known of an engine beside its ledger entry: its process, and when it was heard last. `bubbles` are
    seconds of each stage of a pipeline."""

    model: ModelState
    state: EngineState
    address: bytes
    pid: int | None = None
    heard_at: float = 0.0
    warned: bool = False
    bubbles: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        """MODEL/PHASE."""
        return self.address.decode()


class UnitExecutor:
    """The unit scheduler without its sockets.

    Args:
        epoch: new for each process; gateways and engines tell by it that the queues are lost.
        now: seconds of the machine's monotonic clock. Lease ids start from it, so that an id is never used again by a
            later unit scheduler while a report of an earlier lease may still come.

    Raises:
        ValueError: the deployment contradicts itself, or the policy is not made for it.
    """

    def __init__(self, deployment: Deployment, policy: Policy, memory: Memory, epoch: str, now: float) -> None:
        self.deployment = deployment
        self.policy = policy
        self.memory = memory
        self.epoch = epoch
        self.ledger = unit_ledger(deployment)
        policy.check(self.ledger)
        self.ledger.memory_up = False
        self._started = now
        self._lease_id = int(now * 1_000_000)
        self._out = Outbox()
        self.desk = RequestDesk(deployment, self.ledger, policy, memory, self._out, epoch)
        self.replicas = Replicas(
            deployment, self.ledger, policy, self.desk, self._out, epoch, lambda name: self.moving.moving_out(name)
        )
        self.moving = Departures(
            deployment, self.ledger, self.desk, memory, self._out, epoch, lambda model: self.replicas.load(model)
        )
        self._pages = Pages(self.ledger, policy, memory, self.desk, self.moving, now)
        self._engines_at = now
        self._peers: dict[bytes, Peer] = {}
        for model in self.ledger.models:
            for engine in model.engines:
                address = f"{model.name}/{engine.phase}".encode()
                self._peers[address] = Peer(model, engine, address)

    # ------------------------------------------------------------ the two sides

    def handle(self, peer: bytes, message: Message, now: float) -> None:
        """Take in a message of the peer with that ZeroMQ identity."""
        match message:
            case StepReport():
                self._step_report(peer, message, now)
            case Submit():
                self.desk.submit(peer, message, now)
            case Cancel():
                self.desk.cancel(peer, message, now)
            case GatewayHello():
                self.desk.greeted(peer, message, now)
            case EngineHello():
                self._engine_hello(peer, message, now)
            case EngineLost():
                self._engine_lost(peer, message, now)
            case EngineDown():
                self._engine_down(message, now)
            case GatewayDown():
                log.warning("the controller says that gateway %d died", message.gateway)
                self.desk.gateway_down(message.gateway, now)
            case StateRequest():
                self._out.send(peer, UnitState(self.state(now)))
            case Blocks() | Detached() | MoveStaged() | MoveCommitted() | MoveFailed():
                self.moving.heard(peer, message, now)
            case TakeOver():
                self._out.send(peer, TakenOver(message.move, self.desk.take_over(message, now)))
            case MovingIn():
                self.replicas.migrating(message)
            case Paired():
                self.moving.pairs.paired(message, now)
            case Unpaired():
                self.moving.pairs.unpaired(message.model)
            case Terminating():
                self.replicas.drain(message, now)
            case SchedulerHello():
                self.replicas.greeted(peer, message, now)
            case MigratorHello():
                self._migrator_hello(peer, message, now)
            case Retire() | Revive():
                self._retire(message, now)
            case _:
                log.warning("unexpected %s from %s", type(message).__name__, shown(peer))

    def turn(self, now: float) -> list[tuple[bytes, Message]]:
        """Decide on what has been heard; returns messages and whom to send them to, in order."""
        self._pages.turn(now)
        if now >= self._engines_at:
            self._mind_engines(now)
        self.moving.turn(now)
        self._pages.rebalance(now)
        for grant in self.policy.decide(self.ledger, now):
            self._grant(grant, now)
        self.replicas.turn(now)
        messages, self._out.messages = self._out.messages, []
        return messages

    def wakeup(self, now: float) -> float:
        """When `turn` is due although no message came."""
        due = min(self._pages.due, self.policy.wakeup(self.ledger, now), self.moving.wakeup(), self.replicas.wakeup())
        return min(due, self._engines_at) if self.ledger.share_used else due

    def state(self, now: float) -> dict[str, object]:
        """The unit as JSON-ready data."""
        pids = {peer.name: peer.pid for peer in self._peers.values() if peer.pid is not None}
        bubbles = {peer.model.name: peer.bubbles for peer in self._peers.values() if peer.bubbles}
        if self.memory.connected:
            self.memory.read(self.ledger)
        return unit_state(
            self.deployment,
            self.ledger,
            self.policy,
            self.epoch,
            now - self._started,
            now,
            pids,
            len(self.desk.gateways),
            self.replicas.terminating,
            self.moving,
            bubbles,
        )

    def _migrator_hello(self, peer: bytes, hello: MigratorHello, now: float) -> None:
        if peer != MIGRATOR:
            log.warning("%s is no migrator", shown(peer))
            return
        log.info("the migrator is up, pid %d", hello.pid)
        self.moving.migrator_new(now)
        self.replicas.migrator_new()
        self._out.send(peer, Reset(self.epoch))

    def _retire(self, message: Retire | Revive, now: float) -> None:
        model = self.ledger.by_name.get(message.model)
        if model is None:
            log.warning("%r is no model of this unit", message.model)
        elif isinstance(message, Retire):
            log.info("%s is taken out of service", model.name)
            self.desk.give_back(model, now)
            self._pages.retire(model)
        else:
            log.info("%s is put back into service", model.name)
            self.replicas.terminating.discard(model.name)
            self._pages.revive(model)

    # ------------------------------------------------------------ engines

    def _engine_hello(self, peer: bytes, hello: EngineHello, now: float) -> None:
        engine = self._peers.get(peer)
        if engine is None or engine.name != f"{hello.model}/{hello.phase}":
            log.warning("an engine %s/%s of identity %s is none of this unit", hello.model, hello.phase, shown(peer))
            return
        lost = [*engine.state.inside]
        self.desk.give_up_hand_offs(lost, engine.model)
        gone = self.ledger.engine_up(hello.model, engine.state.phase, now)
        self.desk.tell_lost(gone, f"engine {shown(peer)} started anew")
        engine.pid, engine.heard_at, engine.warned = hello.pid, now, False
        self._out.send(peer, Reset(self.epoch))
        log.info("engine %s is up, pid %d", shown(peer), hello.pid)

    def _engine_down(self, down: EngineDown, now: float) -> None:
        engine = self._peers.get(f"{down.model}/{down.phase}".encode())
        if engine is None:
            log.warning("%s/%s is no engine of this unit", down.model, down.phase)
            return
        model = engine.model
        self.desk.give_up_hand_offs([*engine.state.inside, *engine.state.incoming], model)
        gone = self.ledger.engine_down(down.model, engine.state.phase, now)
        engine.pid = None
        log.warning("engine %s/%s is down: %s", down.model, down.phase, down.reason)
        self.desk.tell_lost(gone, f"engine {down.model}/{down.phase} died: {down.reason}")

    def _engine_lost(self, peer: bytes, message: EngineLost, now: float) -> None:
        engine = self._peers.get(peer)
        if engine is None or not engine.state.up:
            return
        if not self.memory.alive():
            self._pages.gone(now)
            # The engine has let go of its lease, and waits for the memory manager as well.
            self.ledger.lease_void(engine.model.name, engine.state.phase, now)
        mine = [r for r in message.request_ids if r in engine.state.inside]
        self.desk.tell_lost(self.ledger.lost(mine, now), message.reason)
        if not engine.state.inside:
            # Also when all that it lost had been cancelled: it has nothing to use its lease on.
            self.ledger.lease_void(engine.model.name, engine.state.phase, now)

    def _step_report(self, peer: bytes, report: StepReport, now: float) -> None:
        engine = self._peers.get(peer)
        if engine is None or not engine.state.up:
            # Last words of an engine that was given up, or that does not know this unit scheduler yet.
            if engine is not None:
                for late in report.handed:
                    self.memory.drop(engine.model.name, late.key)
            return
        engine.heard_at, engine.warned = now, False
        ledger, name = self.ledger, engine.model.name
        for request_id in report.finished:
            if ledger.finished(request_id, engine.state.phase, report.lease_id, now):
                self.desk.finished(request_id)
        for each in report.handed:
            self.desk.handed_over(name, each, now)
        for first in report.prefilled:
            self.desk.prefilled(first, now)
        for back in report.returned:
            self.desk.returned(back, now)
        if report.bubbles:
            known = engine.bubbles or [0.0] * len(report.bubbles)
            engine.bubbles = [sum(pair) for pair in zip(known, report.bubbles, strict=False)]
        ledger.stepped(
            name,
            engine.state.phase,
            report.lease_id,
            report.lease_left,
            report.seconds,
            report.tokens,
            report.running + report.waiting,
            now,
            report.steps,
            report.prefill_tokens,
            report.prefill_seconds,
        )

    # ------------------------------------------------------------ leases

    def _grant(self, grant: Grant, now: float) -> None:
        self._lease_id += 1
        self.ledger.granted(grant, self._lease_id, now)
        admits = [self.desk.admit(self.ledger.requests[request_id]) for request_id in grant.admit]
        lease = Lease(self._lease_id, grant.steps, grant.seconds, admits, grant.tokens, str(grant.phase))
        engine = self.ledger.by_name[grant.model].engine(grant.phase)
        self._out.send(f"{grant.model}/{engine.phase}".encode(), lease)

    def _mind_engines(self, now: float) -> None:
        """Look after leases whose engines are silent.

        A lease can run out in the engine between two steps without a word; one more step makes it speak up. An engine
        that said it had no request left and stays silent when it is told to run has lost those that it should have. One
        whose requests were all cancelled answers that; if the answer does not come, its lease ends some time after.
        """
        self._engines_at = now + ENGINE_CHECK_SECONDS
        for peer in self._peers.values():
            state = peer.state
            lease = state.lease
            if lease is None:
                continue
            silent = now - max(peer.heard_at, lease.granted_at)
            if state.empty_reports and now - peer.heard_at > SILENCE_SECONDS + 4 * state.step_seconds:
                ids = [r for r, live in state.inside.items() if live.lease_id < lease.lease_id]
                log.error("engine %s does not have the requests that it should have: %s", shown(peer.address), ids)
                self.ledger.lease_void(peer.model.name, state.phase, now)
                self.desk.tell_lost(self.ledger.lost(ids, now), f"engine {shown(peer.address)} does not have them")
                state.empty_reports = 0
            elif not state.inside:
                if now > lease.deadline + max(EMPTY_SECONDS, 20 * state.step_seconds):
                    log.warning("engine %s did not say that it is empty", shown(peer.address))
                    self.ledger.lease_void(peer.model.name, state.phase, now)
            elif now > lease.deadline + SILENCE_SECONDS:
                length = 2 * max(lease.deadline - lease.granted_at, SILENCE_SECONDS)
                self._grant(Grant(peer.model.name, lease.phase, 1, length, lease.share), now)
            if silent > max(HUNG_SECONDS, 20 * state.step_seconds) and not peer.warned:
                peer.warned = True
                log.warning("engine %s holds a lease and has not reported for %.0f s", shown(peer.address), silent)

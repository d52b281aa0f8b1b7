"""Messages in, messages out: carries out what the policy decides.

No socket and no clock: `handle` takes a message and the time, `turn` returns what is to be sent. The one thing asked in
between is the memory manager, behind `Memory`.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from muxserve.deployment import Deployment
from muxserve.scheduling.policy import Policy
from muxserve.scheduling.state import EngineState, LiveRequest, ModelState
from muxserve.scheduling.types import Grant, Phase, Place, QueuedRequest
from muxserve.unit.memory import Memory
from muxserve.unit.profiles import unit_ledger
from muxserve.unit.report import unit_state
from muxserve.wire import (
    Abort,
    Admit,
    Cancel,
    EngineDown,
    EngineHello,
    EngineLost,
    GatewayDown,
    GatewayHello,
    HandOver,
    Lease,
    Lost,
    Message,
    Refused,
    Reset,
    Returned,
    StateRequest,
    StepReport,
    Submit,
    UnitHello,
    UnitState,
)

log = logging.getLogger(__name__)

GATEWAY = b"gateway/"
MEMORY_RETRY_SECONDS = 0.05
MEMORY_CHECK_SECONDS = 1.0
ENGINE_CHECK_SECONDS = 0.05
SILENCE_SECONDS = 0.25
HUNG_SECONDS = 10.0


@dataclass(slots=True)
class Held:
    """What the ledger need not know of a live request. `key` is its hand-off, as long as it may be there."""

    gateway: bytes
    attempt: int
    body: bytes
    output_tokens: list[int]
    key: str = ""
    computed_tokens: int = 0


@dataclass(slots=True)
class Gateway:
    """A gateway that has greeted."""

    epoch: str
    reply_to: str


@dataclass(slots=True)
class Peer:
    """What is known of an engine beside its ledger entry: its process, and when it was heard last."""

    model: ModelState
    phase: Phase
    state: EngineState
    address: bytes
    pid: int | None = None
    heard_at: float = 0.0
    warned: bool = False


@dataclass(slots=True)
class _Outbox:
    messages: list[tuple[bytes, Message]] = field(default_factory=list)

    def send(self, peer: bytes, message: Message) -> None:
        self.messages.append((peer, message))


class UnitExecutor:
    """The unit scheduler without its sockets.

    Args:
        epoch: new for each process; gateways and engines tell by it that the queues are lost.
        now: seconds of the machine's monotonic clock. Lease ids start from it, so that an id is never used again by a
            later unit scheduler while a report of an earlier lease may still come.
    """

    def __init__(self, deployment: Deployment, policy: Policy, memory: Memory, epoch: str, now: float) -> None:
        self.deployment = deployment
        self.policy = policy
        self.memory = memory
        self.epoch = epoch
        self.ledger = unit_ledger(deployment)
        self.ledger.memory_up = False
        self.held: dict[str, Held] = {}
        self.gateways: dict[bytes, Gateway] = {}
        self._started = now
        self._lease_id = int(now * 1_000_000)
        self._out = _Outbox()
        self._quotas: dict[str, int] | None = None
        self._memory_at = now
        self._engines_at = now
        self._peers: dict[bytes, Peer] = {}
        for model in self.ledger.models:
            for phase in Phase:
                address = f"{model.name}/{phase}".encode()
                self._peers[address] = Peer(model, phase, model.engine(phase), address)

    # ------------------------------------------------------------ the two sides

    def handle(self, peer: bytes, message: Message, now: float) -> None:
        """Take in a message of the peer with that ZeroMQ identity."""
        match message:
            case StepReport():
                self._step_report(peer, message, now)
            case Submit():
                self._submit(peer, message, now)
            case Cancel():
                held = self.held
                self._drop([r for r in message.request_ids if r in held and held[r].gateway == peer], now)
            case GatewayHello():
                self._gateway_hello(peer, message, now)
            case EngineHello():
                self._engine_hello(peer, message, now)
            case EngineLost():
                self._engine_lost(peer, message, now)
            case EngineDown():
                self._engine_down(message, now)
            case GatewayDown():
                log.warning("the controller says that the gateway died")
                for address in list(self.gateways):
                    self._forget_gateway(address, now)
            case StateRequest():
                self._out.send(peer, UnitState(self.state(now)))
            case _:
                log.warning("unexpected %s from %s", type(message).__name__, _name(peer))

    def turn(self, now: float) -> list[tuple[bytes, Message]]:
        """Decide on what has been heard; returns messages and whom to send them to, in order."""
        if now >= self._memory_at or not self.memory.connected:
            self._mind_memory(now)
        if self.memory.connected:
            self.memory.read(self.ledger)
        if now >= self._engines_at:
            self._mind_engines(now)
        changes = self.policy.rebalance(self.ledger, now)
        if changes:
            wanted = {change.model: change.pages for change in changes}
            if self.memory.set_quotas(wanted):
                log.debug("quotas: %s", wanted)
                self.memory.read(self.ledger)
                self._quotas = {model.name: model.quota for model in self.ledger.models} | wanted
        for grant in self.policy.decide(self.ledger, now):
            self._grant(grant, now)
        messages, self._out.messages = self._out.messages, []
        return messages

    def wakeup(self, now: float) -> float:
        """When `turn` is due although no message came."""
        due = min(self._memory_at, self.policy.wakeup(self.ledger, now))
        return min(due, self._engines_at) if self.ledger.share_used else due

    def state(self, now: float) -> dict[str, object]:
        """The unit as JSON-ready data."""
        pids = {(p.model.name, p.phase): p.pid for p in self._peers.values() if p.pid is not None}
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
            len(self.gateways),
        )

    # ------------------------------------------------------------ gateways

    def _gateway_hello(self, peer: bytes, hello: GatewayHello, now: float) -> None:
        for address, known in list(self.gateways.items()):
            # There is one gateway at an address: a new one means that the old one is gone.
            if known.epoch != hello.epoch and known.reply_to == hello.reply_to:
                self._forget_gateway(address, now)
        self.gateways[peer] = Gateway(hello.epoch, hello.reply_to)
        self._out.send(peer, UnitHello(self.epoch))
        log.info("gateway %s", hello.epoch)

    def _forget_gateway(self, address: bytes, now: float) -> None:
        del self.gateways[address]
        self._drop([r for r, held in self.held.items() if held.gateway == address], now)

    def _submit(self, peer: bytes, submit: Submit, now: float) -> None:
        if peer not in self.gateways:
            if not peer.startswith(GATEWAY):
                log.warning("a request from %s, which is no gateway", _name(peer))
                return
            # It has not heard yet that this unit scheduler is a new one.
            self.gateways[peer] = Gateway(peer.removeprefix(GATEWAY).decode(), self.deployment.gateway_address)
            self._out.send(peer, UnitHello(self.epoch))
        known = self.held.get(submit.request_id)
        if known is not None:
            if known.attempt >= submit.attempt:
                return
            self._drop([submit.request_id], now)
        model = self.ledger.by_name.get(submit.model)
        if model is None:
            self._refuse(peer, submit.request_id, submit.attempt, f"this unit has no model {submit.model!r}")
            return
        done = len(submit.output_tokens)
        # The last token is not computed upon, so it needs no place; one token is generated whatever was asked for.
        most = submit.prompt_tokens + max(submit.max_tokens, done + 1) - 1
        if self._too_long(peer, submit.request_id, submit.attempt, model, most):
            return
        self.held[submit.request_id] = Held(peer, submit.attempt, submit.body, submit.output_tokens)
        self.ledger.arrived(
            QueuedRequest(
                submit.request_id,
                submit.model,
                submit.prompt_tokens,
                submit.max_tokens,
                submit.arrival,
                submit.priority,
                done,
                # One that was begun before has waited already.
                submit.attempt > 0 or done > 0,
            ),
            now,
        )

    def _too_long(self, gateway: bytes, request_id: str, attempt: int, model: ModelState, tokens: int) -> bool:
        """Refuse a request for which the pool has not enough pages even when the model has all it can get."""
        capacity = self.policy.capacity(model)
        pages = -(-tokens // model.block_tokens) * model.pages_per_block
        if pages <= capacity:
            return False
        most = capacity // model.pages_per_block * model.block_tokens
        text = (
            f"the request can grow to {tokens} tokens, but model {model.name!r} has room for {most} "
            f"({pages} KV pages needed, {capacity} can be had). Ask for fewer tokens, or enlarge kv_pool.size"
        )
        self._refuse(gateway, request_id, attempt, text)
        return True

    def _refuse(self, gateway: bytes, request_id: str, attempt: int, text: str) -> None:
        log.warning("request %s refused: %s", request_id, text)
        self._out.send(gateway, Refused(request_id, attempt, text))

    def _drop(self, request_ids: list[str], now: float) -> None:
        """Requests are not wanted any more, wherever they are."""
        aborts: defaultdict[bytes, list[str]] = defaultdict(list)
        for request_id in request_ids:
            live = self.ledger.requests.get(request_id)
            held = self.held.pop(request_id, None)
            if live is None or held is None:
                continue
            model = live.model.name
            place = self.ledger.cancelled(request_id, now)
            if place is Place.HANDED:
                self.memory.drop(model, held.key)
            elif place is Place.PREFILLING:
                aborts[f"{model}/{Phase.PREFILL}".encode()].append(request_id)
            elif place is Place.DECODING:
                aborts[f"{model}/{Phase.DECODE}".encode()].append(request_id)
        for address, ids in aborts.items():
            self._out.send(address, Abort(ids))

    def _tell_lost(self, request_ids: Iterable[str], reason: str) -> None:
        """Tell the gateways about requests that the ledger has lost already. Their hand-offs are given up."""
        by_gateway: defaultdict[bytes, list[str]] = defaultdict(list)
        for request_id in request_ids:
            by_gateway[self.held.pop(request_id).gateway].append(request_id)
        for gateway, ids in by_gateway.items():
            log.warning("%d requests lost: %s", len(ids), reason)
            self._out.send(gateway, Lost(ids, reason))

    # ------------------------------------------------------------ engines

    def _engine_hello(self, peer: bytes, hello: EngineHello, now: float) -> None:
        engine = self._peers.get(peer)
        if engine is None or (engine.model.name, str(engine.phase)) != (hello.model, hello.phase):
            log.warning("an engine %s/%s of identity %s is none of this unit", hello.model, hello.phase, _name(peer))
            return
        lost = [*engine.state.inside]
        self._give_up_hand_offs(lost, engine.model)
        gone = self.ledger.engine_up(hello.model, engine.phase, now)
        self._tell_lost(gone, f"engine {_name(peer)} started anew")
        engine.pid, engine.heard_at, engine.warned = hello.pid, now, False
        self._out.send(peer, Reset(self.epoch))
        log.info("engine %s is up, pid %d", _name(peer), hello.pid)

    def _engine_down(self, down: EngineDown, now: float) -> None:
        engine = self._peers.get(f"{down.model}/{down.phase}".encode())
        if engine is None:
            log.warning("%s/%s is no engine of this unit", down.model, down.phase)
            return
        model = engine.model
        self._give_up_hand_offs([*engine.state.inside, *engine.state.incoming], model)
        gone = self.ledger.engine_down(down.model, engine.phase, now)
        engine.pid = None
        log.warning("engine %s/%s is down: %s", down.model, down.phase, down.reason)
        self._tell_lost(gone, f"engine {down.model}/{down.phase} died: {down.reason}")

    def _give_up_hand_offs(self, request_ids: Iterable[str], model: ModelState) -> None:
        """Of requests that are about to be lost: a decode engine may have died before it adopted them."""
        for request_id in request_ids:
            held = self.held.get(request_id)
            if held is not None and held.key:
                self.memory.drop(model.name, held.key)

    def _engine_lost(self, peer: bytes, message: EngineLost, now: float) -> None:
        engine = self._peers.get(peer)
        if engine is None or not engine.state.up:
            return
        if not self.memory.alive():
            self._memory_gone(now)
            # The engine has let go of its lease, and waits for the memory manager as well.
            self.ledger.lease_void(engine.model.name, engine.phase, now)
        mine = [r for r in message.request_ids if r in engine.state.inside]
        self._tell_lost(self.ledger.lost(mine, now), message.reason)

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
            if ledger.finished(request_id, engine.phase, report.lease_id, now):
                del self.held[request_id]
        for each in report.handed:
            self._handed_over(name, each, now)
        for back in report.returned:
            self._returned(back, now)
        ledger.stepped(
            name,
            engine.phase,
            report.lease_id,
            report.lease_left,
            report.seconds,
            report.tokens,
            report.running + report.waiting,
            now,
        )

    def _handed_over(self, name: str, message: HandOver, now: float) -> None:
        if not self.ledger.handed_over(message.request_id, message.incarnation, len(message.output_tokens), now):
            self.memory.drop(name, message.key)  # cancelled while it was prefilled
            return
        held = self.held[message.request_id]
        held.key = message.key
        held.computed_tokens = message.computed_tokens
        held.output_tokens = message.output_tokens

    def _returned(self, message: Returned, now: float) -> None:
        if not self.ledger.returned(message.request_id, message.incarnation, len(message.output_tokens), now):
            return
        held = self.held[message.request_id]
        held.output_tokens = message.output_tokens
        held.key = ""
        live = self.ledger.requests[message.request_id]
        if self._too_long(held.gateway, live.request_id, held.attempt, live.model, live.tokens):
            self._drop([live.request_id], now)

    # ------------------------------------------------------------ leases

    def _grant(self, grant: Grant, now: float) -> None:
        self._lease_id += 1
        self.ledger.granted(grant, self._lease_id, now)
        admits = [self._admit(self.ledger.requests[request_id], grant.phase) for request_id in grant.admit]
        lease = Lease(self._lease_id, grant.steps, grant.seconds, admits, grant.tokens)
        self._out.send(f"{grant.model}/{grant.phase}".encode(), lease)

    def _admit(self, live: LiveRequest, phase: Phase) -> Admit:
        held = self.held[live.request_id]
        gateway = self.gateways[held.gateway]
        adopts = phase is Phase.DECODE
        return Admit(
            request_id=live.request_id,
            incarnation=live.lease_id,
            attempt=held.attempt,
            gateway_epoch=gateway.epoch,
            reply_to=gateway.reply_to,
            body=held.body,
            output_tokens=held.output_tokens,
            adopt=held.key if adopts else "",
            computed_tokens=held.computed_tokens if adopts else 0,
        )

    def _mind_engines(self, now: float) -> None:
        """Look after leases whose engines are silent.

        A lease can run out in the engine between two steps without a word; one more step makes it speak up. An engine
        that said it had no request left and stays silent when it is told to run has lost those that it should have.
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
                log.error("engine %s does not have the requests that it should have: %s", _name(peer.address), ids)
                self.ledger.lease_void(peer.model.name, peer.phase, now)
                self._tell_lost(self.ledger.lost(ids, now), f"engine {_name(peer.address)} does not have them")
                state.empty_reports = 0
            elif now > lease.deadline + SILENCE_SECONDS:
                length = 2 * max(lease.deadline - lease.granted_at, SILENCE_SECONDS)
                self._grant(Grant(peer.model.name, peer.phase, 1, length, lease.share), now)
            if silent > max(HUNG_SECONDS, 20 * state.step_seconds) and not peer.warned:
                peer.warned = True
                log.warning("engine %s holds a lease and has not reported for %.0f s", _name(peer.address), silent)

    # ------------------------------------------------------------ memory

    def _mind_memory(self, now: float) -> None:
        memory, ledger = self.memory, self.ledger
        if memory.connected and now >= self._memory_at:
            memory.alive()
        if ledger.memory_up and not memory.connected:
            self._memory_gone(now)
        if not memory.connected:
            if now < self._memory_at:
                return
            if memory.connect():
                ledger.memory_up = True
                # A manager that was started again has forgotten how far quotas had moved. One that this unit scheduler
                # meets first has them from an earlier one, or from the deployment.
                if self._quotas is not None:
                    memory.set_quotas(self._quotas)
            else:
                self._memory_at = now + MEMORY_RETRY_SECONDS
                return
        self._memory_at = now + MEMORY_CHECK_SECONDS

    def _memory_gone(self, now: float) -> None:
        """Its hand-offs died with it. What is in engines, the engines report themselves."""
        self.ledger.memory_up = False
        self._memory_at = now
        handed = [request_id for model in self.ledger.models for request_id in model.handed]
        for request_id in handed:
            self.held[request_id].key = ""
        self._tell_lost(self.ledger.lost(handed, now), "the memory manager died")


def _name(peer: bytes) -> str:
    """A peer's identity for people; identities that ZeroMQ made up are not text."""
    return peer.decode(errors="backslashreplace")

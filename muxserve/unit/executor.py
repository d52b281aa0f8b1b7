"""Messages in, messages out: carries out what the policy decides.

No socket and no clock: `handle` takes a message and the time, `turn` returns what is to be sent. The one thing asked in
between is the memory manager, behind `Memory`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import cast

from muxserve.net.inbox import ImpossibleMessageError
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policy import Policy
from muxserve.scheduling.quarantine import Turn
from muxserve.scheduling.token_throttling import Throttle, prompt_tokens_ahead
from muxserve.scheduling.types import Grant, ModelProfile, Phase, PoolProfile
from muxserve.spec import EnginePhase, ModelSpec, UnitSpec
from muxserve.unit.arrivals import Arrivals
from muxserve.unit.degraded import DegradedModels
from muxserve.unit.engines import Engines
from muxserve.unit.hand_offs import HandOffs
from muxserve.unit.memory import Memory
from muxserve.unit.moving import MIGRATOR, Departures
from muxserve.unit.outbox import Outbox, shown
from muxserve.unit.pages import Pages
from muxserve.unit.replicas import Replicas
from muxserve.unit.report import unit_state
from muxserve.unit.request_table import UnitRequestTable
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
    StepFailed,
    StepReport,
    Submit,
    TakenOver,
    TakeOver,
    Terminating,
    UnitState,
    Unpaired,
)

log = logging.getLogger(__name__)


def model_profile(model: ModelSpec, stages: int = 1) -> ModelProfile:
    """The profile of a model that is deployed on so many stages."""
    return ModelProfile(
        name=model.name,
        pool=model.pool,
        rate=model.rate,
        layers=model.layers,
        kv_heads=model.kv_heads,
        block_tokens=model.block_tokens,
        quota_pages=model.quota_pages,
        floor_pages=model.floor_pages,
        prefill_share=model.prefill_share,
        decode_share=model.decode_share,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.max_num_batched_tokens,
        both=model.phases != "multiplexed",
        depth=stages,
        waiting_tokens=_waiting_tokens(model, stages),
    )


def _waiting_tokens(model: ModelSpec, stages: int) -> int:
    """Prompt tokens that may be in an engine before they are computed."""
    given = model.batching
    throttle = None
    if given.policy == "throttled":
        throttle = Throttle(given.iterations, given.max_prefill, given.min_prefill, given.kv_threshold)
    return prompt_tokens_ahead(stages, model.max_num_batched_tokens, throttle)


def unit_ledger(unit_spec: UnitSpec) -> UnitLedger:
    """An empty ledger of the unit's unit.

    Raises:
        ValueError: the unit's spec contradicts itself.
    """
    # The null page of a pool is never handed out.
    pools = [PoolProfile(pool.name, pool.num_pages - 1) for pool in unit_spec.pools]
    return UnitLedger([model_profile(model, unit_spec.stages) for model in unit_spec.models], pools)


class UnitExecutor:
    """The unit scheduler without its sockets.

    Args:
        epoch: new for each process; gateways and engines tell by it that the queues are lost.
        now: seconds of the machine's monotonic clock. Lease ids start from it, so that an id is never used again by a
            later unit scheduler while a report of an earlier lease may still come.
        gpus: tells the state of the unit's GPUs, for those who cannot ask for it themselves.

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
    ) -> None:
        self.unit_spec = unit_spec
        self.policy = policy
        self.memory = memory
        self.epoch = epoch
        self.ledger = unit_ledger(unit_spec)
        policy.check(self.ledger)
        self.ledger.memory_up = False
        self._gpus = gpus
        self._started = now
        self._lease_id = int(now * 1_000_000)
        self._out = Outbox()
        self.request_table = UnitRequestTable(unit_spec, self.ledger, policy, memory, self._out, epoch)
        self.replicas = Replicas(
            unit_spec,
            self.ledger,
            policy,
            self.request_table,
            self._out,
            epoch,
            lambda name: self.moving.moving_out(name),
        )
        self.moving = Departures(
            unit_spec,
            self.ledger,
            self.request_table,
            memory,
            self._out,
            epoch,
            lambda model: self.replicas.load(model),
        )
        self._arrivals = Arrivals(self.ledger, policy, self.request_table, self._out)
        hand_offs = HandOffs(self.request_table.held, memory)
        self.degraded = DegradedModels(self.ledger, self.request_table, hand_offs, self._out)
        self._pages = Pages(self.ledger, policy, memory, self.request_table, hand_offs, self.moving, now)
        self.engines = Engines(
            self.ledger, self.request_table, hand_offs, memory, self._pages, self._out, epoch, self._grant, now
        )

    # ------------------------------------------------------------ the two sides

    def handle(self, peer: bytes, message: Message, now: float) -> None:
        """Take in a message of the peer with that ZeroMQ identity."""
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
                self.request_table.gateway_down(message.gateway, now)
            case StateRequest():
                self._out.send(peer, UnitState(self.state(now)))
            case MoveStaged() | MoveCommitted() | MoveFailed() | TakeOver() | MovingIn() if peer != MIGRATOR:
                raise ImpossibleMessageError("it is not the unit's migrator")
            case Blocks() | Detached() | MoveStaged() | MoveCommitted() | MoveFailed():
                self.moving.heard(peer, message, now)
            case TakeOver():
                self._out.send(peer, TakenOver(message.move, self._arrivals.take_over(message, now)))
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
                raise ImpossibleMessageError("a unit scheduler has no use for it")

    def turn(self, now: float) -> list[tuple[bytes, Message]]:
        """Decide on what has been heard; returns messages and whom to send them to, in order."""
        self._pages.turn(now)
        self.engines.turn(now)
        self.degraded.turn(now)
        self.moving.turn(now)
        self._pages.rebalance(now)
        for grant in self.policy.decide(self.ledger, now):
            self._grant(grant, now)
        self.replicas.turn(now)
        messages, self._out.messages = self._out.messages, []
        return messages

    def wakeup(self, now: float) -> float:
        """When `turn` is due although no message came."""
        return min(
            self._pages.due,
            self.policy.wakeup(self.ledger, now),
            self.moving.wakeup(),
            self.replicas.wakeup(),
            self.engines.wakeup(),
        )

    def state(self, now: float) -> dict[str, object]:
        """The unit as JSON-ready data."""
        if self.memory.connected:
            self.memory.read(self.ledger)
        gpus = {} if self._gpus is None else {"gpus": self._gpus()}
        return gpus | unit_state(
            self.unit_spec,
            self.ledger,
            self.policy,
            self.epoch,
            now - self._started,
            now,
            len(self.request_table.gateways),
            self.replicas.terminating,
            self.moving,
            self.engines,
            self.degraded.reasons,
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
            self.request_table.give_back(model, now)
            self._pages.retire(model)
        else:
            log.info("%s is put back into service", model.name)
            self.replicas.terminating.discard(model.name)
            self._pages.revive(model)

    # ------------------------------------------------------------ leases

    def _grant(self, grant: Grant, now: float) -> None:
        self._lease_id += 1
        turn = self._turn_of(grant, now) if self.request_table.quarantine else None
        if turn is not None:
            grant = grant._replace(steps=min(grant.steps, turn.steps))
        alone = turn.request_id if turn is not None else ""
        self.ledger.granted(grant, self._lease_id, now, alone)
        admits = [self.request_table.admit(self.ledger.requests[request_id]) for request_id in grant.admit]
        phase = cast(EnginePhase, str(grant.phase))
        lease = Lease(self._lease_id, grant.steps, grant.seconds, admits, grant.tokens, phase, alone)
        engine = self.ledger.by_name[grant.model].engine(grant.phase)
        self._out.send(f"{grant.model}/{engine.phase}".encode(), lease)

    def _turn_of(self, grant: Grant, now: float) -> Turn | None:
        """Which suspect an engine computes alone under that lease, of those that it has or takes in."""
        model = self.ledger.by_name[grant.model]
        inside: Iterable[str] = model.engine(grant.phase).inside
        if model.both and grant.phase is not Phase.BOTH:
            inside = model.prefilling if grant.phase is Phase.PREFILL else model.decoding
        return self.request_table.quarantine.turn({*inside, *grant.admit}, now)

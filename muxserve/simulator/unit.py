"""A unit with a scheduler: the ledger and the policy of the live unit, driven by virtual events.

It tells the ledger what `muxserve.unit.executor` tells it, and when: reports, page counts before each turn, grants.
"""

from __future__ import annotations

from muxserve.costs import LatencyModel
from muxserve.scheduling.engines import EngineState
from muxserve.scheduling.ledger import UnitLedger
from muxserve.scheduling.policies import make_policy
from muxserve.scheduling.policy import Policy, Renewals
from muxserve.scheduling.state import ModelState
from muxserve.scheduling.types import Grant, Phase, QueuedRequest
from muxserve.simulator.decode import DecodeEngine
from muxserve.simulator.leaps import Engine
from muxserve.simulator.leases import Lease
from muxserve.simulator.pages import ModelPages
from muxserve.simulator.prefill import PrefillEngine
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.setup import Options, SimUnit
from muxserve.simulator.world import World

# A wakeup that is due already and changed nothing is tried again after this time, so that the clock moves on.
_AGAIN_SECONDS = 0.001


class LeasedUnit(World):
    """Simulates a unit under `policy` (by default a new one of the name in `unit`).

    Raises:
        ValueError: the policy is for models with one engine of both phases, which are simulated elsewhere.
    """

    decode_engine: type[DecodeEngine] = DecodeEngine

    def __init__(
        self, unit: SimUnit, latency: LatencyModel, options: Options | None = None, policy: Policy | None = None
    ) -> None:
        super().__init__(unit, latency, options)
        self.policy = policy or make_policy(unit.policy)
        self.ledger = UnitLedger([model.profile for model in unit.models], unit.pools)
        self.policy.check(self.ledger)
        self._requests: dict[str, SimRequest] = {}
        self._lease_id = 0
        self._wake_at = -1.0
        self._by_name: dict[str, ModelPages] = {}
        self.decoders: list[tuple[ModelState, DecodeEngine]] = []
        self._leaps_renewals = not (self.overheads.report or self.overheads.lease)
        # What far leaps take for granted; and something has happened that calls for a decision even so.
        self._renewals: Renewals | None = None
        self._stirred = False
        self._woken = False
        self._went_on = False
        # Pages have come free of which the ledger has not been told.
        self._freed = False
        self.prefillers: list[tuple[ModelState, PrefillEngine]] = []
        self._engine: dict[tuple[str, Phase], DecodeEngine | PrefillEngine] = {}
        for index, (model, pages) in enumerate(zip(unit.models, self.pages, strict=True)):
            self._by_name[model.name] = pages
            engine = self.decode_engine(self, model, index, pages)
            self._add(engine)
            self.decoders.append((self.ledger.by_name[model.name], engine))
        # Of steps that begin at the same moment decode comes first, since prefill takes whatever is left.
        for index, (model, pages) in enumerate(zip(unit.models, self.pages, strict=True), len(unit.models)):
            prefiller = PrefillEngine(self, model, index, pages)
            self._add(prefiller)
            self.prefillers.append((self.ledger.by_name[model.name], prefiller))

    def _add(self, engine: DecodeEngine | PrefillEngine) -> None:
        self.engines.append(engine)
        self._engine[engine.model.name, engine.phase] = engine
        self.ledger.engine_up(engine.model.name, engine.phase, 0.0)

    # ------------------------------------------------------------ requests

    def arrive(self, request: SimRequest, now: float) -> None:
        # The last token is not computed upon, so it needs no place; but prompts are admitted with room for one.
        if self._too_long(request, request.prompt + max(1, request.output - 1), now):
            return
        self._requests[request.request_id] = request
        live = self.ledger.arrived(
            QueuedRequest(request.request_id, request.model, request.prompt, request.output, request.arrival), now
        )
        if len(live.model.queue) == 1:
            self._stirred = True
        self.turn_due = True

    def _too_long(self, request: SimRequest, tokens: int, now: float) -> bool:
        model = self.ledger.by_name[request.model]
        capacity = model.quota
        if self.unit.adapt_quotas:
            # Quotas never fall below the floor, and nothing promises that they ever rise above it.
            capacity = min(self.policy.capacity(model), max(model.profile.floor_pages, self._alone(model)))
        pages = -(-tokens // model.block_tokens) * model.pages_per_block
        if pages <= capacity:
            return False
        most = capacity // model.pages_per_block * model.block_tokens
        self.refuse(request, now, f"longer than the {most} tokens that {model.name} has pages for")
        return True

    @staticmethod
    def _alone(model: ModelState) -> int:
        """Pages that the model has for sure because nobody else uses its pool."""
        return model.pool.profile.pages if len(model.pool.models) == 1 else 0

    # ------------------------------------------------------------ engines

    def report(
        self,
        engine: DecodeEngine | PrefillEngine,
        left: int,
        seconds: float,
        tokens: int,
        steps: int,
        remaining: int,
        now: float,
        finished: list[SimRequest],
        handed: list[SimRequest],
        returned: list[SimRequest],
    ) -> None:
        lease_id = engine.lease_id
        if not self.overheads.report:
            self._told(engine, lease_id, left, seconds, tokens, steps, remaining, now, finished, handed, returned)
            return
        self.at(
            now + self.overheads.report,
            lambda now: self._told(
                engine, lease_id, left, seconds, tokens, steps, remaining, now, finished, handed, returned
            ),
        )

    def _told(
        self,
        engine: DecodeEngine | PrefillEngine,
        lease_id: int,
        left: int,
        seconds: float,
        tokens: int,
        steps: int,
        remaining: int,
        now: float,
        finished: list[SimRequest],
        handed: list[SimRequest],
        returned: list[SimRequest],
    ) -> None:
        ledger, phase, name = self.ledger, engine.phase, engine.model.name
        for request in finished:
            ledger.finished(request.request_id, phase, lease_id, now)
            del self._requests[request.request_id]
        for request in handed:
            ledger.handed_over(request.request_id, request.lease_id, request.made, now)
        for request in returned:
            ledger.returned(request.request_id, request.lease_id, request.made, now)
            if self._too_long(request, request.prompt + request.made + 1, now):
                ledger.cancelled(request.request_id, now)
                del self._requests[request.request_id]
        ledger.stepped(name, phase, lease_id, left, seconds, tokens, remaining, now, steps)
        if returned or phase is Phase.PREFILL:
            self._stirred = True
        self.turn_due = True

    # ------------------------------------------------------------ the scheduler

    def turn(self, now: float) -> None:
        stirred, self._stirred = self._stirred, False
        woken, self._woken = self._woken, False
        self._went_on = self.calm and not stirred and self._goes_on(woken, now)
        if self._went_on:
            return
        if self.calm:
            self._stir(now)
        self.turns += 1
        self._tell_pages(now)
        self._freed = False
        if self.unit.adapt_quotas:
            self._rebalance(now)
        for grant in self.policy.decide(self.ledger, now):
            self._grant(grant, now)
        self._plan_to_wake(now)

    def _rebalance(self, now: float) -> None:
        changes = self.policy.rebalance(self.ledger, now)
        if changes:
            for change in changes:
                pages = self._by_name[change.model]
                pages.quota = change.pages
                self.ledger.pages(change.model, pages.held, 0, pages.quota)
            for pool in self.pools.values():
                pool.check(now)

    def _plan_to_wake(self, now: float) -> None:
        wakeup = self.policy.wakeup(self.ledger, now) if self.unit.adapt_quotas else self.ledger.next_retry()
        if wakeup < self._wake_at or (self._wake_at <= now and wakeup != float("inf")):
            self._wake_at = wakeup if wakeup > now else now + _AGAIN_SECONDS
            self.at(self._wake_at, self._wake)

    def _wake(self, now: float) -> None:
        if now == self._wake_at:
            self.turn_due = self._woken = True

    # ------------------------------------------------------------ leaps over renewals

    def usage(self, engine: Engine) -> EngineState:
        return self.decoders[engine.order][0].decode

    def freed(self, pages: ModelPages, now: float) -> None:
        self._freed = True

    def releasing(self, pages: ModelPages, now: float) -> None:
        # What a model held at most is what the ledger would have heard of at a turn just before.
        model = self.ledger.models[pages.index]
        if pages.held > model.peak:
            model.peak = pages.held

    def rest(self, now: float) -> None:
        """See whether all that the policy will do until something happens is to renew leases; then leap over that."""
        if not self._leaps_renewals:
            return
        went_on, self._went_on = self._went_on, False
        renewals = self._renewals
        if renewals is None or not (went_on and self.calm):
            renewals = self._only_renewals(now)
            if renewals != self._renewals or renewals is None:
                self.disturbed(now)
                if renewals is None:
                    return
            self._renewals = renewals
        self.calm = True
        for model, engine in self.decoders:
            if not engine.far:
                lease = model.decode.lease
                if lease is not None and engine.steady(lease, model.decode.step_seconds):
                    engine.extend(renewals)

    def _only_renewals(self, now: float) -> Renewals | None:
        """What the policy says, and nothing but decoding sequences will give pages back: what each model held at most
        before that, the ledger is told (`releasing`)."""
        renewals = None if self._freed else self.policy.renews(self.ledger, now)
        if renewals is None or renewals.until <= now:
            return None
        for model, engine in self.prefillers:
            if model.prefill.lease is not None and engine.releases():
                return None
        return renewals

    def _goes_on(self, woken: bool, now: float) -> bool:
        """All that has been told are steps of decode engines, ends of their sequences, requests that join others in a
        queue, and the time. If nothing but renewals follows from that, see to them without asking for a decision."""
        ledger, self._freed = self.ledger, False
        if woken or any(model.queue for model in ledger.models):
            self._tell_pages(now)
            if woken and self.unit.adapt_quotas:
                self._rebalance(now)
        else:
            for model, pages in zip(ledger.models, self.pages, strict=True):
                if pages.held < pages.told:
                    pages.told = pages.held
                    ledger.pages(model.name, pages.held, 0, pages.quota)
        renewals = self._only_renewals(now)
        if renewals is None or renewals != self._renewals:
            return False
        due = []
        for model, engine in self.decoders:
            lease = model.decode.lease
            if not engine.far and lease is not None and model.decoding and lease.due(now):
                if not engine.between():
                    return False
                due.append((model, engine))
        for model, engine in due:
            engine.renew(model.decode, renewals.contended, now)
        if woken:
            self._plan_to_wake(now)
        return True

    def disturbed(self, now: float) -> None:
        calm, self.calm = self.calm, False
        self._renewals = None
        for model, engine in self.decoders:
            if engine.far:
                if calm:
                    engine.catch_up(now, model.decode, True)
                engine.cut(now)

    def _stir(self, now: float) -> None:
        """A turn is due: bring all engines to what they would have told by now."""
        self.calm = False
        for model, engine in self.decoders:
            if engine.far:
                engine.catch_up(now, model.decode, False)
                if engine.stands_at_report(now):
                    engine.report_now(now)
        # It is taking place.
        self.turn_due = self._stirred = False

    # ------------------------------------------------------------ what the scheduler sees and does

    def _tell_pages(self, now: float) -> None:
        self._count_pages(now)
        ledger = self.ledger
        for model, pages in zip(ledger.models, self.pages, strict=True):
            held = pages.held
            if held != pages.told:
                pages.told = held
                ledger.pages(model.name, held, 0, pages.quota)
        for name, pool in self.pools.items():
            held = pool.held
            if held != pool.told:
                pool.told = held
                ledger.pool_pages(name, pool.profile.pages - held, 0)

    def _grant(self, grant: Grant, now: float) -> None:
        self._lease_id += 1
        lease_id = self._lease_id
        self.ledger.granted(grant, lease_id, now)
        admit = [self._requests[request_id] for request_id in grant.admit]
        for request in admit:
            request.lease_id = lease_id
        engine = self._engine[grant.model, grant.phase]
        delay = self.overheads.lease
        if not delay:
            engine.receive(Lease(lease_id, grant.steps, grant.share, grant.seconds, admit), now)
            return
        self.at(
            now + delay,
            lambda now: engine.receive(Lease(lease_id, grant.steps, grant.share, grant.seconds, admit), now),
        )

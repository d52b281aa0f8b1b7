"""Models that do not all fit into their unit: `muxserve.scheduling.residency` decides which of them are awake, as it
does live. Requests for the others wait before the unit's own queue, as they do in the global scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from muxserve.scheduling.pool_room import divided, divided_anew, pools_load
from muxserve.scheduling.residency import Residency
from muxserve.scheduling.residency_types import Refuse, Residence, Sleep, Standing, Wake
from muxserve.simulator.events import TimedEvent
from muxserve.simulator.machine import UnitMachine
from muxserve.simulator.requests import SimRequest
from muxserve.simulator.resident_model import ResidentModel
from muxserve.simulator.result import ResidencyResult
from muxserve.simulator.scheduler import LeaseScheduler
from muxserve.simulator.setup import SimResidency
from muxserve.simulator.turns import TurnTaking

# How often the policy is asked while requests wait and nothing else happens: its rules know of times that pass.
ASKED_SECONDS = 0.1
# From a decision on the room of KV pools until it is known that they have it: two messages, and the pause between two
# reports of a unit (`unit.replicas.REPORT_SECONDS`).
ROOM_SECONDS = 0.02


class ResidentModels:
    """The models of a unit with `residency`. One that is put to sleep finishes what the unit has of it first.

    Raises:
        ValueError: the residency is that of other models.
    """

    def __init__(self, machine: UnitMachine, scheduler: LeaseScheduler, residency: SimResidency) -> None:
        if set(residency.models) != {model.name for model in machine.spec.models}:
            raise ValueError(f"unit {machine.spec.name} needs to know what each of its models takes")
        self.machine = machine
        self.scheduler = scheduler
        machine.ended = self.ended
        self.residency = residency
        self.awake = Residency(residency.rules, residency.models)
        self.models = {
            name: ResidentModel(name, Residence.AWAKE if name in residency.awake else Residence.ASLEEP, float("-inf"))
            for name in residency.models
        }
        turns = residency.turns
        self.turn_taking = TurnTaking(machine, scheduler, self, turns) if turns is not None else None
        # The bytes that KV pools may take, where they take what models leave, and whether that is about to change.
        self._room = 0
        self._changes_room = False
        if (kv := residency.rules.kv) is not None:
            taken = residency.rules.fixed + sum(residency.models[name].bytes for name in residency.awake)
            self._make_room(max(kv.least, min(kv.most, residency.rules.limit - taken)), machine.clock.now)
        self.peak_bytes = self._taken()
        self._there: set[str] = set()
        self._asks = self.awake.preparing
        if self._asks:
            machine.clock.at(0.0, _PolicyDue(self))
        # Until when wakes have been followed, and which expectation of their next end counts.
        self._followed = 0.0
        self._expected = 0
        # Whose engines stay while they sleep: each has been awake once. Who slept last is at the end.
        asleep = [name for name in residency.models if name not in residency.awake]
        self._resting = asleep[: residency.resting]
        for name in asleep:
            scheduler.retire(name)

    # ------------------------------------------------------------ requests

    def arrived(self, request: SimRequest, now: float) -> None:
        """A request is served at once, or waits until its model is awake."""
        model = self.models[request.model]
        self.awake.arrived(request.model, now)
        if self.turn_taking is not None and not request.content:
            # Nobody else has its blocks in common with it; it looks for them itself after its turn.
            request.content = ((request.request_id, request.prompt),)
        if model.residence is Residence.AWAKE:
            self._serve(model, request, now)
            return
        model.waiting.append(request)
        model.waited += 1
        self._decide(now)

    def _serve(self, model: ResidentModel, request: SimRequest, now: float) -> None:
        self._there.add(request.request_id)
        self._run(model, 1, now)
        self.scheduler.serve(request, now)
        if self.residency.rules.kv is not None:
            self._ask_later(now)

    def _serve_waiting(self, model: ResidentModel, now: float) -> None:
        if self.turn_taking is not None:
            self.turn_taking.go_on(model.name, now)
        waiting, model.waiting = model.waiting, []
        for request in waiting:
            self._serve(model, request, now)

    def ended(self, request: SimRequest, now: float) -> None:
        """A request was finished or refused."""
        if request.request_id in self._there:  # not one that was refused before it was served
            self._there.remove(request.request_id)
            model = self.models[request.model]
            self._run(model, -1, now)
            self.sleep_if_done(model, now)
            if self.awake.preparing:
                self._ask_later(now)

    # ------------------------------------------------------------ turns

    def wanted(self, name: str) -> bool:
        """Whether requests wait here for the model to be awake."""
        return bool(self.models[name].waiting) or (self.turn_taking is not None and self.turn_taking.waits(name))

    def wait_again(self, name: str, now: float) -> None:
        """What waits in the unit's queue for the model waits for it to be awake again."""
        model = self.models[name]
        back = self.scheduler.withdraw(name, now)
        for request in back:
            self.stands_still(request, now)
        model.waiting = back + model.waiting

    def stands_still(self, request: SimRequest, now: float) -> None:
        """The unit computes nothing of the request for now."""
        self._there.remove(request.request_id)
        self._run(self.models[request.model], -1, now)

    def begin_again(self, request: SimRequest, now: float) -> None:
        """A request that was detached has lost its KV: all its tokens are prefilled once more."""
        self.scheduler.forget(request, now)
        self._serve(self.models[request.model], request, now)

    def _standings(self, now: float) -> list[Standing]:
        """How all models stand. Nothing is measured of their memory: each takes what its costs say."""
        return [
            Standing(each.name, each.residence, each.since, each.running, self._waiting(each, now))
            for each in self.models.values()
        ]

    def _waiting(self, model: ResidentModel, now: float) -> list[float]:
        """Since when each of those waits that wait for the model."""
        waiting = [request.arrival for request in model.waiting]
        if self.turn_taking is not None:
            waiting += self.turn_taking.since(model.name, now)
        return waiting

    # ------------------------------------------------------------ what is decided

    def sleep_if_done(self, model: ResidentModel, now: float) -> None:
        """A model that leaves has gone when nothing of it runs."""
        if model.residence is Residence.LEAVING and not model.running:
            model.idle_since = now
            self.machine.clock.at(now + self.residency.rules.sleep_seconds, _SleepEnds(self, model))

    def asleep(self, model: ResidentModel, now: float) -> None:
        """What the model had on the devices is gone, if nothing of it has come since."""
        if model.residence is Residence.LEAVING and not model.running:
            model.become(Residence.ASLEEP, now)
            self.scheduler.retire(model.name)
            self._resting = [*self._resting, model.name][-self.residency.resting :] if self.residency.resting else []
            self.awake.times.slept(now - model.idle_since)
            self._decide(now)

    def _wake_seconds(self, model: ResidentModel) -> float:
        """Seconds that waking it takes alone."""
        residency = self.residency
        return residency.models[model.name].seconds - residency.started_seconds * (model.name in self._resting)

    def _run(self, model: ResidentModel, more: int, now: float) -> None:
        """The model has so many more running requests; wakes beside it go on as fast as that lets them."""
        self._follow(now)
        model.running += more
        if model.running == max(more, 0):  # it begins to run, or has ended
            self._expect(now)

    def _waking(self) -> int:
        return sum(each.residence is Residence.WAKING for each in self.models.values())

    def _slowdown(self) -> float:
        """How many times as long as alone the wakes that go on take."""
        busy = sum(each.running > 0 for each in self.models.values())
        others = self._waking() - 1 + self.residency.contention.decode_weight * busy
        return 1.0 + self.residency.contention.drag * max(0, others) / self.residency.rules.wakes.cores

    def _follow(self, now: float) -> None:
        """How far wakes have come."""
        gone = (now - self._followed) / self._slowdown()
        self._followed = now
        for each in self.models.values():
            if each.residence is Residence.WAKING:
                each.left -= gone

    def _expect(self, now: float) -> None:
        """The next wake ends then if nothing else begins or ends before."""
        self._expected += 1
        if self.residency.contention.drag and self.machine.compute.waking != (count := self._waking()):
            self.machine.compute.beside_wakes(
                count, self.residency.rules.wakes.cores, self.residency.contention.decode_weight
            )
            self.machine.decide_again()
        waking = [each.left for each in self.models.values() if each.residence is Residence.WAKING]
        if waking:
            self.machine.clock.at(now + max(0.0, min(waking)) * self._slowdown(), _WakeEnds(self, self._expected))

    def wake_ends(self, expected: int, now: float) -> None:
        """The next wake has ended, if that is still what was `expected`."""
        if expected != self._expected:
            return
        self._follow(now)
        waking = [each for each in self.models.values() if each.residence is Residence.WAKING]
        self._woke(min(waking, key=lambda each: each.left), now)
        self._expect(now)

    def _woke(self, model: ResidentModel, now: float) -> None:
        self.awake.woke(model.name, now - model.since)
        model.become(Residence.AWAKE, now)
        self.scheduler.revive(model.name)
        self._serve_waiting(model, now)
        self._decide(now)

    def _make_room(self, size: int, now: float) -> None:
        self._room = size
        for name, pages in divided(self.scheduler.ledger, size).items():
            self.machine.pages.pools[name].resize(pages, now)
        self.scheduler.tell_pages(now)

    def room_due(self, now: float) -> None:
        """The KV pools have the room that was decided on."""
        self._changes_room = False
        target = self.awake.pools.target
        assert target is not None, "it was decided"
        self._make_room(target, now)
        self.machine.decide_again()
        self._decide(now)

    def _tell_pools(self, now: float) -> None:
        """Have the policy know how the KV pools stand."""
        if self.residency.rules.kv is not None:
            self.scheduler.tell_pages(now)
            self.awake.pools.reported(pools_load(self.scheduler.ledger, self._room))

    def _decide(self, now: float) -> None:
        self._tell_pools(now)
        if self.residency.rules.kv is not None and divided_anew(self.scheduler.ledger, self._room) is not None:
            self._make_room(self._room, now)
            self.machine.decide_again()
        for change in self.awake.decide(now, None, self._standings(now)):
            if isinstance(change, Refuse):
                continue  # refused or never served: neither is within its objectives
            model = self.models[change.model]
            if isinstance(change, Wake):
                self._follow(now)
                model.wakes += 1
                model.become(Residence.WAKING, now)
                model.left = self._wake_seconds(model)
                if model.name in self._resting:
                    self._resting.remove(model.name)
                self._expect(now)
            elif isinstance(change, Sleep):
                model.sleeps += 1
                model.become(Residence.LEAVING, now)
                self.sleep_if_done(model, now)
            else:
                model.sleeps -= 1
                model.become(Residence.AWAKE, now)
                self._serve_waiting(model, now)
        if not (self._changes_room or self.awake.pools.settled):
            self._changes_room = True
            self.machine.clock.at(now + ROOM_SECONDS, _RoomDue(self))
        if self.turn_taking is not None:
            self.turn_taking.decide(now)
        self.peak_bytes = max(self.peak_bytes, self._taken())
        self._ask_later(now)

    def _ask_later(self, now: float) -> None:
        if not self._asks and self._restless():
            self._asks = True
            self.machine.clock.at(now + ASKED_SECONDS, _PolicyDue(self))

    def policy_due(self, now: float) -> None:
        """The policy is asked again while time alone may change what it decides."""
        self._asks = False
        if self._restless():
            self._decide(now)

    def _restless(self) -> bool:
        """Whether time alone may change what was decided last."""
        if any(map(self.wanted, self.models)):
            return True
        if self.residency.rules.kv is not None and any(each.running for each in self.models.values()):
            return True  # what runs may need more pages, or fewer
        # When nothing runs any more, nothing has to be kept free for.
        return self.awake.preparing or (self.awake.restless and any(each.running for each in self.models.values()))

    def _taken(self) -> int:
        costs = self.residency.models
        held = sum(costs[n].bytes for n, each in self.models.items() if each.residence is not Residence.ASLEEP)
        waking = (costs[each.name].load_bytes for each in self.models.values() if each.residence is Residence.WAKING)
        pools = sum(p.room * p.profile.page_bytes for p in self.machine.pages.pools.values())
        fixed = self.residency.rules.fixed + (pools if self.residency.rules.kv is not None else 0)
        return fixed + held + sum(waking)

    def result(self) -> ResidencyResult:
        """What happened to the models."""
        return ResidencyResult(
            wakes=sum(each.wakes for each in self.models.values()),
            sleeps=sum(each.sleeps for each in self.models.values()),
            waited=sum(each.waited for each in self.models.values()),
            peak_bytes=self.peak_bytes,
            switches=self.turn_taking.switches if self.turn_taking is not None else 0,
        )


@dataclass(slots=True)
class _PolicyDue(TimedEvent):
    """Time has passed, of which the policy's rules know."""

    residents: ResidentModels

    def handle(self, now: float) -> None:
        self.residents.policy_due(now)


@dataclass(slots=True)
class _RoomDue(TimedEvent):
    """KV pools have another room."""

    residents: ResidentModels

    def handle(self, now: float) -> None:
        self.residents.room_due(now)


@dataclass(slots=True)
class _SleepEnds(TimedEvent):
    """A model that was put to sleep is asleep."""

    residents: ResidentModels
    model: ResidentModel

    def handle(self, now: float) -> None:
        self.residents.asleep(self.model, now)


@dataclass(slots=True)
class _WakeEnds(TimedEvent):
    """The next wake ends, by what was `expected` when this was planned."""

    residents: ResidentModels
    expected: int

    def handle(self, now: float) -> None:
        self.residents.wake_ends(self.expected, now)

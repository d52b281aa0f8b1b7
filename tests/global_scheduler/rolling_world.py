"""Gateways and units of both phases around a `SchedulerCore`, without sockets or time: every message waits until it
arrives, in order on each connection, and processes die at any moment.

Units do what real ones do, simply: they take requests in, prefill all that wait, then decode. What the core believes
of them is held against what they have.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

from muxserve.global_scheduler.core import SchedulerCore
from muxserve.global_scheduler.outbox import Destination, ToClient, ToUnit
from muxserve.global_scheduler.rolling_scheduler import RollingModelScheduler
from muxserve.replicas.migration import MigrationRules
from muxserve.replicas.views import InstanceLoad
from muxserve.rolling.member import MacroMember
from muxserve.rolling.rules import RollingRules
from muxserve.spec import FleetSpec
from muxserve.wire import (
    ControllerHello,
    DrainReplicas,
    Loads,
    Message,
    NotPlaced,
    Paired,
    Placed,
    RollingReport,
    RollingRequest,
    SchedulerHello,
    StopReplica,
    Terminating,
    Unpaired,
    Unplace,
    Waits,
    decode,
    encode,
)
from tests.global_scheduler.support import CONTROLLER, fleet, place
from tests.support.chance import one_of

MODEL = "m"
CAPACITY = 2_000
RULES = RollingRules(ttft=0.5, tpot=0.02, prefill=((1, 0.001), (1000, 0.5)), lower=2, upper=3)


@dataclass
class Held:
    """A request in a unit: its tokens, and what it has of its answer; `since` when it has decoded."""

    tokens: int
    max_tokens: int
    prefilled: bool = False
    since: float | None = None
    made: int = 0
    with_kv: bool = False


@dataclass
class FakeUnit:
    """A unit, with its connection to the global scheduler."""

    name: str
    epoch: int = 0
    alive: bool = True
    model_up: bool = True
    terminating: bool = False
    linked: bool = True
    whole: bool = True
    greeted: bool = False
    steps: int = 0
    held: dict[str, Held] = field(default_factory=dict)
    came: list[str] = field(default_factory=list)
    prefilled: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    seconds: float = 0.0
    # Who takes its decodes while it is drained, as it was last told.
    pair: str = ""
    inbox: deque[Message] = field(default_factory=deque)
    outbox: deque[Message] = field(default_factory=deque)


@dataclass
class Asked:
    """A request as its gateway has it: `unit` is where it was submitted; `lives` counts them."""

    tokens: int
    max_tokens: int
    since: float
    asked: bool = True
    unit: str = ""
    lives: int = 1


class RollingWorld:
    """One gateway, units u0, u1, ... and a global scheduler."""

    def __init__(self, random: Random, units: int) -> None:
        self.random = random
        self.now = 1000.0
        self.units = {f"u{n}": FakeUnit(f"u{n}") for n in range(units)}
        self.serving = set(self.units)
        # Units that a drain or scaling takes away. If these are all units, requests are refused, and rightly.
        self.unwanted: set[str] = set()
        self.ordered = False
        self.requests: dict[str, Asked] = {}
        self.done = 0
        self.moved = 0
        self.count = 0
        self.to_core: deque[Message] = deque()
        self.from_core: deque[Message] = deque()
        # Answers to each question: a Place that has not been taken back gets one Placed or NotPlaced.
        self.answers: dict[str, int] = {}
        self.refused = 0
        self.stopped: list[str] = []
        self.generation = 0
        self.born = 0
        self.start()

    # ------------------------------------------------------------ the core

    def fleet(self) -> FleetSpec:
        serves = {name: [MODEL] if name in self.serving else [] for name in self.units}
        rules = {MODEL: RULES}
        return fleet(serves, models=[MODEL], rolling=rules, migration=MigrationRules(), generation=self.generation)

    def start(self) -> None:
        """A new global scheduler: all connections begin anew, and gateways ask again."""
        self.born += 1
        self.core = SchedulerCore(self.fleet(), f"s{self.born}", self.now)
        for unit in self.units.values():
            self.relink(unit)
        self.to_core.clear()
        self.from_core.clear()
        self.answers.clear()
        self.core.handle(CONTROLLER, ControllerHello(), self.now)
        for request_id, request in self.requests.items():
            if request.asked:
                self.ask(request_id, request)
        self.flush()

    def relink(self, unit: FakeUnit) -> None:
        """The connection to a unit breaks with everything on it, and is there again."""
        unit.inbox.clear()
        unit.outbox.clear()
        self.core.unit_gone(unit.name, self.now)
        unit.linked = unit.alive
        if unit.linked:
            unit.inbox.append(SchedulerHello(self.core.epoch))

    def flush(self) -> None:
        for peer, message in self.core.tick(self.now):
            self.send(peer, decode(encode(message)))

    def send(self, peer: Destination, message: Message) -> None:
        if isinstance(peer, ToUnit):
            if self.units[peer.name].linked:
                self.units[peer.name].inbox.append(message)
        elif peer == CONTROLLER:
            if isinstance(message, StopReplica):
                self.stopped.append(message.unit)
        else:
            self.from_core.append(message)

    def hear(self, peer: Destination, message: Message) -> None:
        self.core.handle(peer, decode(encode(message)), self.now)
        self.flush()

    # ------------------------------------------------------------ the gateway

    def ask(self, request_id: str, request: Asked) -> None:
        self.answers[request_id] = 0
        self.to_core.append(place(request_id, MODEL, request.tokens + 1, request.since, max_tokens=request.max_tokens))

    def arrive(self) -> None:
        self.count += 1
        tokens = self.random.choice((5, 40, 200, 600))
        request = Asked(tokens, self.random.randint(1, 30), self.now)
        self.requests[f"g-{self.count}"] = request
        self.ask(f"g-{self.count}", request)

    def cancel(self) -> None:
        if self.requests:
            request_id = self.random.choice(list(self.requests))
            request = self.requests.pop(request_id)
            if request.asked:
                self.to_core.append(Unplace([request_id]))
            elif request.unit:
                self.drop(self.units[request.unit], request_id)

    def gateway(self) -> None:
        """A message of the global scheduler arrives at the gateway."""
        if not self.from_core:
            return
        message = self.from_core.popleft()
        assert isinstance(message, Placed | Waits | NotPlaced)
        request = self.requests.get(message.request_id)
        if request is None or not request.asked or isinstance(message, Waits):
            return
        self.answers[message.request_id] += 1
        assert self.answers[message.request_id] == 1, f"{message.request_id} is answered twice"
        if isinstance(message, NotPlaced):
            # An order to end a replica that reaches it in its next life may leave none that is to stay.
            self.refused += not (self.ordered and "all are drained or stopped" in message.message)
            del self.requests[message.request_id]
            return
        request.asked = False
        self.submit(message.request_id, request, self.units[message.unit])

    def submit(self, request_id: str, request: Asked, unit: FakeUnit) -> None:
        if not unit.alive or not unit.model_up or unit.terminating:
            self.again(request_id)
            return
        request.unit = unit.name
        if request_id in unit.left:
            self.tell(unit)
        unit.held[request_id] = Held(request.tokens, request.max_tokens)
        unit.came.append(request_id)

    def again(self, request_id: str) -> None:
        """A unit has lost it: the gateway asks for another."""
        request = self.requests.get(request_id)
        if request is not None:
            request.asked, request.unit, request.since = True, "", self.now
            request.lives += 1
            self.ask(request_id, request)

    # ------------------------------------------------------------ units

    def drop(self, unit: FakeUnit, request_id: str) -> None:
        if unit.held.pop(request_id, None) is None:
            return
        unit.left.append(request_id)

    def work(self, unit: FakeUnit) -> None:
        """A step: a prompt, or a token for each that decodes."""
        if not unit.alive or not unit.model_up:
            return
        waiting = next((key for key, held in unit.held.items() if not held.prefilled), None)
        if waiting is not None:
            held = unit.held[waiting]
            held.prefilled = True
            held.made = 1
            unit.seconds += RULES.prefill_seconds(held.tokens) * self.random.uniform(0.5, 2.0)
            unit.prefilled.append(waiting)
            self.finish(unit, waiting)
            return
        if any(held.since is not None for held in unit.held.values()):
            unit.steps += 1
        for request_id, held in list(unit.held.items()):
            held.since = self.now if held.since is None else held.since
            held.made += 1
            if self.random.random() < 0.02:
                # Preempted: it is to be prefilled again.
                self.tell(unit)
                unit.left.append(request_id)
                self.tell(unit)
                unit.held[request_id] = Held(held.tokens + held.made, held.max_tokens)
                unit.came.append(request_id)
            else:
                self.finish(unit, request_id)

    def finish(self, unit: FakeUnit, request_id: str) -> None:
        held = unit.held[request_id]
        if held.made >= held.max_tokens:
            self.drop(unit, request_id)
            if self.requests.pop(request_id, None) is not None:
                self.done += 1

    def tell(self, unit: FakeUnit) -> None:
        """The unit reports."""
        if not unit.alive or not unit.linked or not unit.greeted:
            unit.whole = True
        elif unit.model_up and (unit.whole or unit.came or unit.prefilled or unit.left):
            report = RollingReport(unit.name, f"e{unit.epoch}", MODEL, steps=unit.steps, prefill_seconds=unit.seconds)
            report.whole = unit.whole
            if unit.whole:
                report.requests = [self.request(key, held) for key, held in unit.held.items()]
            else:
                # What has come and gone meanwhile is named, too.
                gone = Held(1, 1)
                report.requests = [self.arrival(key, unit.held.get(key, gone)) for key in unit.came]
                report.prefilled, report.left = [*unit.prefilled], [*unit.left]
            unit.whole = False
            unit.outbox.append(report)
        unit.came.clear()
        unit.prefilled.clear()
        unit.left.clear()
        unit.seconds = 0.0

    def arrival(self, request_id: str, held: Held) -> RollingRequest:
        since = 0.0 if held.with_kv else None
        return RollingRequest(request_id, held.tokens, held.max_tokens, held.with_kv, since)

    def request(self, request_id: str, held: Held) -> RollingRequest:
        since = None if held.since is None else self.now - held.since
        return RollingRequest(request_id, held.tokens, held.max_tokens, held.prefilled, since)

    def load(self, unit: FakeUnit) -> None:
        self.tell(unit)
        if unit.alive and unit.linked and unit.greeted:
            loads = []
            if unit.model_up:
                running = sum(held.prefilled for held in unit.held.values())
                waiting = len(unit.held) - running
                loads = [InstanceLoad("", CAPACITY, MODEL, 0, running, waiting, terminating=unit.terminating)]
            unit.outbox.append(Loads(unit.name, f"e{unit.epoch}", loads))

    def deliver(self, unit: FakeUnit) -> None:
        """A message of the unit arrives at the global scheduler."""
        if unit.outbox:
            self.hear(ToUnit(unit.name), unit.outbox.popleft())

    def receive(self, unit: FakeUnit) -> None:
        """A message of the global scheduler arrives at the unit."""
        if not unit.inbox:
            return
        match unit.inbox.popleft():
            case SchedulerHello():
                unit.greeted = unit.whole = True
                self.load(unit)
            case Paired(destination=destination):
                unit.pair = destination
            case Unpaired():
                unit.pair = ""
            case Terminating(on=on):
                unit.terminating = on
                for request_id in [key for key, held in unit.held.items() if on and not held.prefilled]:
                    self.drop(unit, request_id)
                    self.again(request_id)
                self.load(unit)

    def move(self, unit: FakeUnit) -> None:
        """A request that decodes goes to the unit that this one is paired with, unless that one does not take it."""
        there = self.units.get(unit.pair)
        movable = [key for key, held in unit.held.items() if held.prefilled and key in self.requests]
        if not (there and unit.terminating and unit.alive and unit.model_up and movable):
            return
        if not (there.alive and there.model_up) or there.terminating:
            return
        request_id = self.random.choice(movable)
        held = unit.held[request_id]
        if request_id in unit.came:
            self.tell(unit)
        self.drop(unit, request_id)
        if request_id in there.left:
            self.tell(there)
        there.held[request_id] = Held(held.tokens + held.made, held.max_tokens, True, None, held.made, True)
        there.came.append(request_id)
        self.requests[request_id].unit = there.name
        self.moved += 1

    def lose(self, unit: FakeUnit) -> None:
        """Its engine dies, and is there again later."""
        if not unit.alive or not unit.model_up:
            return
        unit.model_up = False
        unit.steps = 0
        unit.whole = True
        lost = list(unit.held)
        unit.held.clear()
        for each in (unit.came, unit.prefilled, unit.left):
            each.clear()
        for request_id in lost:
            self.again(request_id)
        self.load(unit)

    def die(self, unit: FakeUnit) -> None:
        if unit.alive:
            self.lose(unit)
            unit.alive, unit.terminating, unit.greeted, unit.pair = False, False, False, ""
            self.relink(unit)

    def revive(self, unit: FakeUnit) -> None:
        if not unit.alive:
            unit.alive, unit.epoch = True, unit.epoch + 1
            self.relink(unit)
        if not unit.model_up and unit.name in self.serving:
            unit.model_up = True
            self.load(unit)

    # ------------------------------------------------------------ the fleet

    def drain(self, unit: FakeUnit) -> None:
        if len(self.serving - self.unwanted) > 1 and unit.name in self.serving:
            self.unwanted.add(unit.name)
            self.ordered = True
            self.hear(CONTROLLER, DrainReplicas(unit.name, [MODEL]))

    def end_stopped(self) -> None:
        """The controller ends what is drained, and writes the fleet file."""
        for name in self.stopped:
            unit = self.units[name]
            if len(self.serving) > 1 and name in self.unwanted:
                self.serving.discard(name)
                self.unwanted.discard(name)
                self.lose(unit)
                # Stopping engines takes seconds: nothing is on its way for so long.
                unit.outbox.clear()
                unit.terminating = False
        self.stopped.clear()
        self.change()

    def grow(self) -> None:
        """The controller starts a replica."""
        missing = sorted(self.units.keys() - self.serving)
        if missing:
            self.serving.add(missing[0])
            self.change()
            self.revive(self.units[missing[0]])

    def change(self) -> None:
        self.generation += 1
        self.core.change(self.fleet(), self.now)
        self.flush()

    # ------------------------------------------------------------ everything

    def anyone(self) -> FakeUnit:
        """The unit that something happens to next, a moment later."""
        self.now += self.random.choice((0.0, 0.001, 0.005))
        return self.random.choice(list(self.units.values()))

    def question(self) -> None:
        """A message of the gateway arrives at the global scheduler."""
        if self.to_core:
            self.hear(ToClient(b"gateway/g"), self.to_core.popleft())

    def pause(self, seconds: float) -> None:
        self.now += seconds
        self.flush()

    def break_off(self, unit: FakeUnit) -> None:
        """The connection to a unit that lives is lost."""
        if unit.alive:
            self.relink(unit)

    def event(self) -> None:
        """Anything happens."""
        unit = self.anyone()
        one_of(
            self.random,
            (80, self.arrive),
            (10, self.cancel),
            (30, lambda: self.move(unit)),
            (180, lambda: self.work(unit)),
            (120, lambda: self.tell(unit)),
            (40, lambda: self.load(unit)),
            (140, lambda: self.deliver(unit)),
            (100, lambda: self.receive(unit)),
            (100, self.gateway),
            (140, self.question),
            (5, lambda: self.lose(unit)),
            (3, lambda: self.die(unit)),
            (22, lambda: self.revive(unit)),
            (3, lambda: self.break_off(unit)),
            (3, self.start),
            (3, lambda: self.drain(unit)),
            (5, self.end_stopped),
            (6, self.grow),
            (10, lambda: self.pause(self.random.choice((0.05, 0.1, 0.3)))),
        )

    def drained_event(self, drained: FakeUnit) -> None:
        """Anything happens that has to do with a replica which is being drained, and now and then a death."""
        unit = self.anyone()
        one_of(
            self.random,
            (150, lambda: self.move(drained)),
            (100, lambda: self.work(unit)),
            (150, lambda: self.tell(unit)),
            (80, lambda: self.load(unit)),
            (200, lambda: self.deliver(unit)),
            (170, lambda: self.receive(unit)),
            (50, lambda: self.pause(0.1)),
            (3, lambda: self.lose(unit)),
            (3, lambda: self.die(unit)),
            (24, lambda: self.revive(unit)),
            (3, lambda: self.break_off(unit)),
            (2, self.start),
            (5, self.cancel),
            (60, self.question if self.to_core else self.gateway),
        )

    def arrive_all(self) -> None:
        """Every message arrives, and what follows from it."""
        for _ in range(1000):
            for unit in self.units.values():
                while unit.inbox:
                    self.receive(unit)
                self.tell(unit)
                while unit.outbox:
                    self.deliver(unit)
            while self.to_core:
                self.question()
            while self.from_core:
                self.gateway()
            self.flush()
            if not self.to_core and not self.from_core and not any(u.inbox or u.outbox for u in self.units.values()):
                return
        raise AssertionError("messages without end")

    def calm_down(self) -> None:
        """Nothing dies any more."""
        self.end_stopped()
        for unit in self.units.values():
            self.revive(unit)
        self.arrive_all()

    def beat(self, seconds: float = 0.1) -> None:
        """Time passes, and units say that they are there."""
        self.now += seconds
        for unit in self.units.values():
            self.load(unit)
        self.arrive_all()

    def model_scheduler(self) -> RollingModelScheduler:
        model_scheduler: Any = self.core._model_schedulers[MODEL]
        assert isinstance(model_scheduler, RollingModelScheduler)
        return model_scheduler

    def check(self) -> None:
        """What the core believes is consistent in itself."""
        model_scheduler: Any = self.model_scheduler()
        scheduler = model_scheduler._scheduler
        members = {**scheduler.members, **scheduler.draining, **model_scheduler._apart}
        for member in members.values():
            check_sums(member)
        assert {name for macro in scheduler.macros.values() for name in (m.name for m in macro.ring)} == set(
            scheduler.members
        )
        for macro in scheduler.macros.values():
            assert len(macro) <= RULES.upper
            for each in macro.ring:
                assert scheduler.members[each.name] is each
        waiting = {demand.request_id for demand in scheduler.waiters()} | model_scheduler._held
        assert waiting == set(model_scheduler._askers), "who waits and who is to be answered"
        for request_id, sent in model_scheduler._placements._sent.items():
            assert request_id in members[sent.unit].requests

    def disagreements(self) -> list[str]:
        """Where the core and the units differ, all messages having arrived and nothing being on its way."""
        model_scheduler: Any = self.model_scheduler()
        found = []
        for name, unit in self.units.items():
            if not unit.model_up or name not in self.serving:
                continue
            member = model_scheduler._member(name)
            if member is None:
                found.append(f"{name} is no member")
                continue
            known = set(member.requests) - model_scheduler._placements.at(name)
            if known != set(unit.held):
                found.append(f"{name} has {sorted(unit.held)}, believed are {sorted(known)}")
                continue
            for request_id in known:
                if member.requests[request_id].prefilled != unit.held[request_id].prefilled:
                    found.append(f"{request_id} in {name}: prefilled {unit.held[request_id].prefilled}")
        return found

    def run_out(self) -> None:
        """No more requests come; all that are there are served."""
        for _ in range(4000):
            if not self.requests:
                return
            for unit in self.units.values():
                for _ in range(5):
                    self.work(unit)
            self.beat(0.05)
            self.check()
        raise AssertionError(f"not served: {self.requests}")


def check_sums(member: MacroMember) -> None:
    """What a member knows adds up."""
    requests = member.requests.values()
    assert member.promised == sum(each.tokens for each in requests)
    assert member.pending == sum(not each.prefilled for each in requests)
    assert abs(member.pending_seconds - sum(r.prefill_seconds for r in requests if not r.prefilled)) < 1e-6
    places = sorted(each.place for each in requests if each.place is not None)
    assert member.places == places
    first = [each.first_place for each in member.requests.values() if each.prefilled]
    assert member.first_tokens == len(first)
    assert abs(member.sum_of_first_places - sum(first)) < 1e-6 * max(1.0, abs(member.sum_of_first_places))
    assert member.window == ("prefill" if member.pending else "decode")
    fresh = {key for key, each in member.requests.items() if each.prefilled and each.place is None}
    assert set(member.fresh) == fresh

"""Units, engines and a global scheduler around a `Router`, without sockets or time: every message waits until somebody
says that it arrives, connections break and processes die at any moment."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

from muxserve.gateway.routing.placing import PLACE_SECONDS
from muxserve.gateway.routing.requests import RequestTable, Tracked
from muxserve.gateway.routing.router import Router
from muxserve.wire import (
    Cancel,
    Elsewhere,
    Lost,
    Message,
    Place,
    Placed,
    StateReply,
    StateRequest,
    Submit,
    TookOver,
    Unplace,
    Waits,
)
from tests.support.chance import one_of
from tests.support.requests import asking

STOP = 0
MODEL = "m"


@dataclass
class Out:
    """Stands for vLLM's `EngineCoreOutput`."""

    request_id: str
    new_token_ids: list[int] = field(default_factory=list)
    new_logprobs: Any = None
    new_prompt_logprobs_tensors: Any = None
    new_sampling_mask: Any = None
    prefill_stats: Any = None
    pooling_output: Any = None
    finish_reason: int | None = None


@dataclass
class Life:
    """A request in a unit: which attempt, and how many tokens it has."""

    attempt: int
    done: int
    begun: bool = False
    moves: int = 0


@dataclass
class Unit:
    """One unit and its connection to the gateway: messages on their way in both directions."""

    name: str
    epoch: int = 0
    alive: bool = False
    linked: bool = False
    serving: dict[str, Life] = field(default_factory=dict)
    inbox: deque[Message] = field(default_factory=deque)
    outbox: deque[Message] = field(default_factory=deque)


class World:
    """Requests have `length` tokens 0, 1, 2, ...; `streamed` is what the front end got of each."""

    def __init__(self, random: Random, units: int, with_scheduler: bool) -> None:
        self.random = random
        self.table = RequestTable("gw", max_tries=10_000)
        self.router = Router(self.table)
        self.now = 0.0
        self.units = {f"u{n}": Unit(f"u{n}") for n in range(units)}
        self.tokens: list[deque[tuple[str, int, int, list[int], bool]]] = [deque() for _ in range(2 * units)]
        self.asked: deque[Message] = deque()
        self.with_scheduler = with_scheduler
        self.scheduler_up = False
        self.length: dict[str, int] = {}
        self.streamed: dict[str, list[int]] = {}
        self.finished: dict[str, int] = {}
        self.moves = 0
        self.submitted: set[tuple[str, int]] = set()
        self.repeated: set[str] = set()
        self.uncancelled: set[str] = set()
        self.untold: set[str] = set()
        # Attempts of which some engine has sent the last token.
        self.ended: set[tuple[str, int]] = set()
        self.router.learn({name: [MODEL] for name in self.units}, [MODEL] if with_scheduler else [], [MODEL], self.now)

    # ------------------------------------------------------------ the gateway's surroundings

    def flush(self) -> None:
        """Send what the router wants sent."""
        out = self.router.out
        for name, message in out.units:
            unit = self.units[name]
            assert unit.linked, f"{message} for {name}, which is not up"
            unit.inbox.append(message)
            if isinstance(message, Submit):
                life = message.request_id, message.attempt
                if life in self.submitted:
                    self.repeated.add(message.request_id)
                self.submitted.add(life)
        assert self.scheduler_up or not out.scheduler
        self.asked.extend(out.scheduler)
        assert not out.failed
        out.units.clear()
        out.scheduler.clear()
        out.again.clear()
        self.moves += len(out.moved)
        out.moved.clear()

    def submit(self) -> None:
        request = Tracked(
            self.table.new_id(),
            f"f{len(self.streamed)}",
            asking(MODEL, 7, 100),
            arrival=self.now,
        )
        self.length[request.front_id] = self.random.randint(1, 12)
        self.streamed[request.front_id] = []
        self.finished[request.front_id] = 0
        self.router.submit(request, self.now)

    def cancel(self) -> None:
        alive = self.table.all()
        if alive:
            request = self.random.choice(alive)
            self.router.cancel(self.table.cancel(MODEL, [request.front_id]))
            del self.length[request.front_id]

    def link(self, unit: Unit) -> None:
        if unit.alive and not unit.linked:
            unit.linked = True
            self.router.unit_up(unit.name, str(unit.epoch), self.now)
            for request_id, life in unit.serving.items():
                if life.moves:  # what it had said of them may have been lost
                    self.tell(unit, TookOver(request_id, life.attempt, life.moves))

    def cut(self, unit: Unit) -> None:
        """The connection breaks, with everything on its way; the unit does not notice."""
        if unit.linked:
            unit.linked = False
            # Cancelled in vain; it serves them to their end.
            self.uncancelled |= {r for m in unit.inbox if isinstance(m, Cancel) for r in m.request_ids}
            unit.inbox.clear()
            # Who moved there is looked for elsewhere until it has been quiet for long.
            self.untold |= {m.request_id for m in unit.outbox if isinstance(m, TookOver)}
            unit.outbox.clear()
            self.router.unit_down(unit.name, self.now)

    def die(self, unit: Unit) -> None:
        unit.alive = False
        unit.serving.clear()
        self.cut(unit)

    def start(self, unit: Unit) -> None:
        if not unit.alive:
            unit.alive = True
            unit.epoch += 1

    def scheduler(self, up: bool) -> None:
        if up == self.scheduler_up or not self.with_scheduler:
            return
        self.scheduler_up = up
        self.asked.clear()
        if up:
            self.router.placing.scheduler_connected(self.now)
        else:
            self.router.placing.scheduler_gone(self.now)

    def schedule(self) -> None:
        """The global scheduler answers one message; of units it may know old news."""
        if self.asked:
            message = self.asked.popleft()
            if isinstance(message, Place):
                if self.random.random() < 0.2:
                    self.router.placing.waits(Waits(message.request_id))
                    self.asked.append(message)
                    return
                name = self.random.choice(list(self.units))
                self.router.placing.placed(Placed(message.request_id, name), self.now)
            else:
                assert isinstance(message, Unplace)

    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.now += seconds
        placing = self.router.placing
        while placing.next_deadline is not None and placing.next_deadline <= self.now:
            placing.expire(self.now)
        for request in self.table.overdue(self.now):
            self.router.replace(request, self.now, "tokens_lost")
        self.router.repeat_quiet(self.now)
        placing.retry(self.now)

    # ------------------------------------------------------------ units

    def receive(self, unit: Unit) -> None:
        """The unit takes a message."""
        if not unit.inbox or not unit.alive:
            return
        match unit.inbox.popleft():
            case Submit() as submit:
                known = unit.serving.get(submit.request_id)
                if known is None or known.attempt < submit.attempt:
                    assert submit.output_tokens == list(range(len(submit.output_tokens)))
                    unit.serving[submit.request_id] = Life(submit.attempt, len(submit.output_tokens))
            case Cancel() as cancel:
                for request_id, attempt in zip(cancel.request_ids, cancel.attempts, strict=True):
                    if request_id in unit.serving and unit.serving[request_id].attempt <= attempt:
                        del unit.serving[request_id]
            case StateRequest():
                self.tell(unit, StateReply({}))

    def say(self, unit: Unit) -> None:
        """A message of the unit arrives."""
        if unit.outbox and unit.linked:
            self.router.take(unit.name, unit.outbox.popleft(), self.now)

    def tell(self, unit: Unit, message: Message) -> None:
        if unit.linked:
            unit.outbox.append(message)

    def step(self, unit: Unit) -> None:
        """An engine computes some tokens of a request and sends them, unless it dies on the way."""
        for request_id, life in list(unit.serving.items()):
            if self.random.random() < 0.7:
                continue
            length = self.full_length(request_id)
            count = min(self.random.randint(1, 2), length - life.done)
            new = list(range(life.done, life.done + count))
            last = life.done + count >= length
            channel = self.tokens[self.channel(unit, life)]
            channel.append((request_id, life.attempt, life.done, new, last))
            life.done += count
            life.begun = True
            if last:
                self.ended.add((request_id, life.attempt))
                del unit.serving[request_id]

    def channel(self, unit: Unit, life: Life) -> int:
        """Prefill and decode engine send on connections of their own."""
        return 2 * list(self.units).index(unit.name) + life.begun

    def full_length(self, request_id: str) -> int:
        request = self.table.get(request_id)
        # A stale copy of one that is gone runs on for a little.
        return self.length.get(request.front_id, 8) if request is not None else 8

    def lose(self, unit: Unit) -> None:
        """An engine of the unit dies."""
        lost = [request_id for request_id in unit.serving if self.random.random() < 0.5]
        attempts = [unit.serving.pop(request_id).attempt for request_id in lost]
        if lost:
            self.tell(unit, Lost(lost, attempts, "died"))

    def give_back(self, unit: Unit) -> None:
        """The unit is being drained."""
        queued = [request_id for request_id, life in unit.serving.items() if not life.begun]
        attempts = [unit.serving.pop(request_id).attempt for request_id in queued]
        if queued:
            self.tell(unit, Elsewhere(queued, attempts))

    def move(self, source: Unit, destination: Unit) -> None:
        """A request moves. Whether it does, and what the source knows of that, is open until the end."""
        if source is destination or not source.serving or not destination.alive:
            return
        request_id = self.random.choice(list(source.serving))
        life = source.serving[request_id]
        # Two lives of a request are not submitted and moved to the same place at the same time, as a move takes longer
        # than a message. What else the gateway has just said may come late.
        under_way = [message for unit in self.units.values() for message in unit.inbox if isinstance(message, Submit)]
        if any(request_id in repr(message) for message in [*under_way, *destination.outbox]):
            return
        known = destination.serving.get(request_id)
        takes = self.random.random() < 0.8 and (known is None or known.attempt < life.attempt)
        # The gateway must have greeted there.
        takes = takes and destination.linked
        uncertain = self.random.random() < 0.2
        if takes or uncertain:
            del source.serving[request_id]
        if takes:
            destination.serving[request_id] = Life(life.attempt, life.done, True, life.moves + 1)
            self.tell(destination, TookOver(request_id, life.attempt, life.moves + 1))
        if uncertain:
            self.tell(source, Lost([request_id], [life.attempt], "it was moving when its destination fell silent"))

    # ------------------------------------------------------------ tokens

    def arrive(self, channel: int) -> None:
        """A token message arrives."""
        if not self.tokens[channel]:
            return
        request_id, attempt, offset, new, last = self.tokens[channel].popleft()
        out = Out(request_id, list(new), finish_reason=STOP if last else None)
        for request, output in self.table.outputs([(request_id, attempt, offset)], [out], self.now).ready:
            self.streamed[request.front_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.finished[request.front_id] += 1
                self.router.finished(request)

    def drop_tokens(self) -> None:
        """An engine dies with its last message."""
        channel = self.random.choice(self.tokens)
        if channel:
            channel.pop()

    # ------------------------------------------------------------ everything

    def event(self) -> None:
        """Anything happens."""
        random, units = self.random, list(self.units.values())
        unit = random.choice(units)
        one_of(
            random,
            (12, self.submit),
            (2, self.cancel),
            (36, lambda: self.receive(unit)),
            (25, lambda: self.step(unit)),
            (30, lambda: self.arrive(random.randrange(len(self.tokens)))),
            (15, lambda: self.say(unit)),
            (30, lambda: self.move(unit, random.choice(units))),
            (14, lambda: (self.start(unit), self.link(unit))),
            (2, lambda: self.die(unit)),
            (3, lambda: self.cut(unit)),
            (3, lambda: self.lose(unit)),
            (3, lambda: self.give_back(unit)),
            (2, self.drop_tokens),
            (5, lambda: self.scheduler(random.random() < 0.7)),
            (13, self.schedule if self.scheduler_up else lambda: None),
            (5, lambda: self.wait(random.choice((0.1, PLACE_SECONDS, 1.0, 6.0)))),
        )
        self.flush()

    def calm_down(self) -> None:
        """Nothing dies any more, everything is up, and everything that was said arrives."""
        for unit in self.units.values():
            self.start(unit)
            self.link(unit)
            self.flush()
        self.scheduler(True)
        self.flush()
        while self.asked or any(unit.inbox or unit.outbox for unit in self.units.values()):
            self.schedule()
            for unit in self.units.values():
                self.receive(unit)
                self.say(unit)
            self.flush()

    def disagreements(self) -> list[str]:
        """Where the units and the router, all messages having arrived, are of different opinions."""
        found = []
        for unit in self.units.values():
            for request_id, life in unit.serving.items():
                request = self.table.get(request_id)
                if request_id in self.uncancelled or request_id in self.repeated:
                    continue  # there may be a second copy, until the first ends
                if request is not None and (request_id, request.attempt) in self.ended:
                    continue
                if request is None or (request.unit, request.attempt) != (unit.name, life.attempt):
                    found.append(f"{unit.name} serves {request_id}, attempt {life.attempt}, which nobody wants")
        for request in self.table.all():
            here = self.units[request.unit].serving.get(request.request_id) if request.unit else None
            if request.request_id in self.untold:
                continue
            if here is None and request.unit and (request.request_id, request.attempt) not in self.ended:
                found.append(f"nobody serves {request.request_id}, attempt {request.attempt}")
        return found

    def finish(self) -> None:
        """Everything is served."""
        for _ in range(100):
            while self.asked:
                self.schedule()
                self.flush()
            for unit in self.units.values():
                while unit.inbox:
                    self.receive(unit)
                self.step(unit)
                while unit.outbox:
                    self.say(unit)
                    self.flush()
            for channel in range(len(self.tokens)):
                while self.tokens[channel]:
                    self.arrive(channel)
                    self.flush()
            if not len(self.table) and not any(unit.inbox or unit.serving for unit in self.units.values()):
                return
            self.wait(1.0)
            self.flush()

"""Finds units for requests that have none: the global scheduler says where, or a simple rule when it does not.

Pure: no socket, no clock; see `router`.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

from muxserve.gateway.routing.requests import Failure, RequestTable, RouterOutbox, Tracked
from muxserve.wire import Degraded, NotPlaced, Placed, Unplace, Waits

log = logging.getLogger(__name__)

# The global scheduler answers within a millisecond; when it has not after this long, the gateway chooses by itself.
PLACE_SECONDS = 0.25
# Who has no unit although nobody is asked for one tries again this often.
RETRY_SECONDS = 1.0
# A question that waits for its answer is repeated this often: it may have been lost, or forgotten.
REPEAT_SECONDS = 2.0
# What a request waits for that the global scheduler has heard of, which knows more.
ITS_MODEL = "a replica of its model"


class WaitState(Enum):
    """What a request without a unit waits for."""

    # The answer of the global scheduler, for `PLACE_SECONDS`.
    ASKED = "asked"
    # The same for longer, since no unit here can take the request.
    OVERDUE = "overdue"
    # A unit, which the global scheduler has said it will name.
    PROMISED = "promised"
    # A unit that comes up; nobody's answer is awaited.
    NO_UNIT = "no unit"


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request without a unit. `since` is when the global scheduler was first asked or, with nobody to ask, when the
    request came into this state. A question that has no answer at `due` is late."""

    request: Tracked
    state: WaitState
    since: float
    due: float | None = None


class Placing:
    """Who serves what, which of them is up, and the requests that wait for a unit.

    Args:
        table: records where requests go.
        out: where messages and failures go.
    """

    def __init__(self, table: RequestTable, out: RouterOutbox) -> None:
        self.up: set[str] = set()
        self._table = table
        self._out = out
        self._replicas: dict[str, tuple[str, ...]] = {}
        self._asks: frozenset[str] = frozenset()
        self._models: frozenset[str] = frozenset()
        # Replicas, (unit, model), whose engines fail at each start: why, and when they are tried again.
        self._degraded: dict[tuple[str, str], tuple[str, float]] = {}
        self._suspects: frozenset[tuple[str, str]] = frozenset()
        self._scheduler_up = False
        # Its connection stands, but it has left a request without an answer: it may hang.
        self._silent = False
        # Requests without a unit; those of one state are in the order in which they came into it.
        self._waiting: dict[Tracked, WaitingRequest] = {}
        # Questions in the order in which they are due. One that was answered is due no more.
        self._questions: deque[tuple[float, WaitingRequest]] = deque()
        self._repeated_at = 0.0

    @property
    def waiting(self) -> Counter[str]:
        """How many requests have no unit, by model."""
        return Counter(request.model for request in self._waiting)

    @property
    def next_deadline(self) -> float | None:
        """When `expire` has something to do."""
        while self._questions and self._questions[0][1].due != self._questions[0][0]:
            self._questions.popleft()
        return self._questions[0][0] if self._questions else None

    @property
    def scheduler_up(self) -> bool:
        """Whether the global scheduler is there and answers."""
        return self._scheduler_up and not self._silent

    def waits_for(self, request: Tracked) -> str:
        """What a request without a unit waits for, in words."""
        match self._state(request):
            case WaitState.PROMISED:
                return ITS_MODEL
            case WaitState.ASKED | WaitState.OVERDUE:
                return "an answer of the global scheduler"
        units = self.replicas(request.model)
        if not units:
            return "a unit that serves it"
        down = [unit for unit in units if unit not in self.up]
        return f"unit {', '.join(down)} to come up" if down else f"unit {', '.join(units)} to take it"

    def replicas(self, model: str) -> tuple[str, ...]:
        """The units that serve `model`, up or not."""
        return self._replicas.get(model, ())

    def others(self, request: Tracked) -> list[str]:
        """Units that are up and could serve `request` instead of the one it is at."""
        return [unit for unit in self.candidates(request) if unit != request.unit]

    # ------------------------------------------------------------ requests

    # A request without a unit:
    #
    # 1. Nobody will serve its model again: it fails.
    # 2. Every replica of its model is degraded: it fails, and its client hears when these are tried again.
    # 3. The global scheduler places requests of its model, is connected and not silent: it is asked (ASKED), and
    #    3.1 names a unit: the request goes there or, if that unit cannot take it, as in 4; without any, as in 6;
    #    3.2 says that it will name one: PROMISED;
    #    3.3 has no unit: the request fails, or begins at 1 again where its client has tokens and the unit is only late;
    #    3.4 says nothing within `PLACE_SECONDS`: OVERDUE, and if 4 finds a unit, the scheduler is silent from then on
    #        until it says anything;
    #    3.5 is gone: all requests that wait for it begin at 1 again.
    #    In 3.2 and 3.4 it is asked again every `REPEAT_SECONDS`.
    # 4. A unit is up that serves the model, has not refused the request and is not degraded: the one with the fewest
    #    requests takes it. A silent scheduler is asked and the question withdrawn, since any answer ends its silence.
    # 5. The global scheduler is silent, and no unit can take the request: as in 3.
    # 6. There is nobody to ask: NO_UNIT. It begins at 1 again when the fleet gets better, and every `RETRY_SECONDS`.
    def place(self, request: Tracked, now: float, last: str = "") -> None:
        """Find a unit for `request`, which has none, or someone to ask; `last` is where it just was."""
        if self._is_removed(request.model):  # 1; it may have waited for admission meanwhile
            self._fail_removed(request)
            return
        if self.trouble(request.model):  # 2
            self._fail_degraded(request, now)
            return
        asks = request.model in self._asks and self._scheduler_up
        unit = self._choose(request, last) if self._silent or not asks else ""
        if unit:  # 4
            if asks:
                self._out.scheduler += [request.place(now), Unplace([request.request_id])]
            self.give(request, unit, now)
        elif asks:  # 3 or 5
            self._ask(self._wait(request, WaitState.ASKED, now), now)
            self._out.scheduler.append(request.place(now))
        else:  # 6
            self._wait(request, WaitState.NO_UNIT, now)

    def give(self, request: Tracked, unit: str, now: float) -> None:
        """Send `request` to `unit`, which is up."""
        self._forget(request)
        self._table.assign(request, unit)
        request.heard_at = now
        self._out.units.append((unit, request.submit()))

    def withdraw(self, requests: Iterable[Tracked]) -> None:
        """These wait for nothing any more."""
        asked = []
        for request in requests:
            if self._is_asked(request):
                asked.append(request.request_id)
            self._forget(request)
        if asked:
            self._out.scheduler.append(Unplace(asked))

    def fail(self, request: Tracked, message: str, failure: Failure) -> None:
        """End `request` with an error."""
        self._forget(request)
        self._table.remove(request)
        self._out.failed.append((request, message, failure))

    # ------------------------------------------------------------ models that cannot be served for now

    def degraded(self, unit: str, message: Degraded, now: float) -> None:
        """A unit says that its replica of a model cannot be started, or (without a reason) that it is up again."""
        key = unit, message.model
        if message.reason:
            self._degraded[key] = message.reason, now + message.retry_in
            if self.trouble(message.model):
                for request in [r for r in self._waiting if r.model == message.model]:
                    self.withdraw([request])
                    self._fail_degraded(request, now)
        elif self._degraded.pop(key, None) is not None:
            self.settle(now)

    def heard_anew(self, unit: str) -> None:
        """A new unit scheduler has greeted, and says itself which of its models are degraded."""
        self._degraded = {key: why for key, why in self._degraded.items() if key[0] != unit}

    def trouble(self, model: str) -> str:
        """Why waiting for `model` is pointless: every replica of it is degraded; "" if it is not."""
        known = [self._degraded.get((unit, model)) for unit in self.replicas(model)] if self._degraded else []
        return known[0][0] if known and known[0] is not None and all(known) else ""

    def retry_after(self, model: str, now: float) -> int:
        """Whole seconds, at least one, until a degraded `model` is tried again."""
        due = [self._degraded[unit, model][1] for unit in self.replicas(model) if (unit, model) in self._degraded]
        return max(1, math.ceil(min(due, default=now) - now))

    def _fail_degraded(self, request: Tracked, now: float) -> None:
        why, seconds = self.trouble(request.model), self.retry_after(request.model, now)
        text = f"the model {request.model!r} cannot be served at the moment ({why}); it is tried again in {seconds} s"
        self.fail(request, text, Failure.DEGRADED)

    # ------------------------------------------------------------ what becomes of the fleet

    def learn(
        self,
        units: Mapping[str, Collection[str]],
        asks: Iterable[str],
        models: Iterable[str],
        now: float,
        suspects: Collection[tuple[str, str]] = (),
    ) -> None:
        """The fleet has changed, see `Router.learn`."""
        replicas: defaultdict[str, list[str]] = defaultdict(list)
        for unit, serves in units.items():
            for model in serves:
                replicas[model].append(unit)
        self._replicas = {model: tuple(names) for model, names in replicas.items()}
        self._asks, self._models = frozenset(asks), frozenset(models)
        self._suspects = frozenset(suspects)
        self.up.intersection_update(units)
        self._degraded = {key: why for key, why in self._degraded.items() if key[1] in units.get(key[0], ())}
        for request in list(self._waiting):
            if self._is_removed(request.model):
                self.withdraw([request])
                self._fail_removed(request)
        self.settle(now)

    def settle(self, now: float) -> None:
        """Something is better than it was: look again for those who wait."""
        for waiting in self._those(WaitState.NO_UNIT):  # 6
            self._again(waiting, now)
        if self._silent:
            for waiting in self._those(WaitState.OVERDUE, WaitState.PROMISED):
                self._place_alone(waiting.request, now)

    def retry(self, now: float) -> None:
        """Look again for those who have been without a unit for some time."""
        for waiting in self._those(WaitState.NO_UNIT):  # 6
            if now - waiting.since >= RETRY_SECONDS:
                # Whoever was drained when it gave the request back may be staying after all.
                waiting.request.refused_by = ()
                self._again(waiting, now)
        if now - self._repeated_at >= REPEAT_SECONDS:
            self._repeated_at = now
            for waiting in self._those(WaitState.OVERDUE, WaitState.PROMISED):  # 3.2, 3.4
                self._out.scheduler.append(waiting.request.place(waiting.since))
                if waiting.state is WaitState.PROMISED and waiting.due is None:
                    self._ask(waiting, now)

    # ------------------------------------------------------------ the global scheduler

    def scheduler_connected(self, now: float) -> None:
        """The global scheduler is there."""
        self._scheduler_up, self._silent = True, False
        self.settle(now)

    def scheduler_gone(self, now: float) -> None:
        """The global scheduler is not there."""
        self._scheduler_up, self._silent = False, False
        for waiting in self._those(WaitState.OVERDUE, WaitState.PROMISED, WaitState.ASKED):  # 3.5
            self._again(waiting, now)

    def expire(self, now: float) -> None:
        """Place the requests for which the global scheduler has not said anything in time, as far as there is somebody
        to serve them; the others go on waiting for it."""
        late = []
        while (due := self.next_deadline) is not None and due <= now:
            _, waiting = self._questions.popleft()
            waiting.due = None
            late.append(waiting)
        for waiting in late:  # 3.4
            self._wait(waiting.request, WaitState.OVERDUE, waiting.since)
            if self._place_alone(waiting.request, now) and not self._silent:
                self._silent = True
                log.warning("the global scheduler does not answer; requests are placed without it")
        if late and self._silent:
            self.settle(now)

    def placed(self, message: Placed, now: float) -> None:
        """The global scheduler has answered."""
        request = self._answered(message.request_id)
        if request is None:
            return
        unit = message.unit
        if unit not in self.up or unit in request.refused_by or (unit, request.model) in self._degraded:
            # It cannot serve, and the scheduler does not know yet; or it is new, and we do not know yet.
            unit = self._choose(request)
        if unit:  # 3.1
            self.give(request, unit, now)
        else:  # 6
            self._wait(request, WaitState.NO_UNIT, now)

    def waits(self, message: Waits) -> None:
        """The global scheduler has heard of a request, and will say where it goes."""
        request = self._answered(message.request_id)
        if request is None:
            return
        if message.asleep:
            # Its unit has it again when it is awake, although it has just given it back.
            request.refused_by = ()
        waiting = self._waiting[request]
        waiting.due = None
        if waiting.state is not WaitState.PROMISED:  # 3.2
            self._wait(request, WaitState.PROMISED, waiting.since)

    def not_placed(self, message: NotPlaced, now: float) -> None:
        """The global scheduler has no unit for a request."""
        request = self._answered(message.request_id)
        if request is None:
            return
        if not message.late:  # 3.3
            self.fail(request, message.message, Failure.NEVER)
        elif not request.emitted:
            self.fail(request, message.message, Failure.LATE)
        else:
            # Its client has waited before, and reads along: it is not sent away because of a death.
            self._again(self._waiting[request], now)

    # ------------------------------------------------------------ inside

    def _answered(self, request_id: str) -> Tracked | None:
        """The request that waits for this answer; None if it was placed without it, or is not wanted any more."""
        if self._silent:
            self._silent = False
            log.info("the global scheduler answers again")
        request = self._table.get(request_id)
        return request if request is not None and self._is_asked(request) else None

    def _is_removed(self, model: str) -> bool:
        """Whether nobody will serve the model again; one that was removed has its replicas until they are empty."""
        return model not in self._models and not self.replicas(model)

    def _fail_removed(self, request: Tracked) -> None:
        self.fail(request, f"the model {request.model!r} has been removed", Failure.AGAIN)

    def _state(self, request: Tracked) -> WaitState | None:
        waiting = self._waiting.get(request)
        return waiting.state if waiting is not None else None

    def _is_asked(self, request: Tracked) -> bool:
        """Whether the global scheduler has heard of it, and has not named a unit."""
        return self._state(request) not in (None, WaitState.NO_UNIT)

    def _those(self, *states: WaitState) -> list[WaitingRequest]:
        """Those that wait in these states, state by state."""
        return [waiting for state in states for waiting in self._waiting.values() if waiting.state is state]

    def _wait(self, request: Tracked, state: WaitState, since: float) -> WaitingRequest:
        """`request` waits in `state` from now on."""
        self._forget(request)
        waiting = self._waiting[request] = WaitingRequest(request, state, since)
        return waiting

    def _ask(self, waiting: WaitingRequest, now: float) -> None:
        """The global scheduler is asked now."""
        waiting.due = now + PLACE_SECONDS
        self._questions.append((waiting.due, waiting))

    def _again(self, waiting: WaitingRequest, now: float) -> None:
        """Begin at 1 again."""
        self._forget(waiting.request)
        self.place(waiting.request, now)

    def _place_alone(self, request: Tracked, now: float) -> bool:
        """Place `request`, for which the global scheduler was asked, without it; False if no unit can take it."""
        unit = self._choose(request)
        if unit:
            self._out.scheduler.append(Unplace([request.request_id]))
            self.give(request, unit, now)
        return bool(unit)

    def candidates(self, request: Tracked) -> list[str]:
        """Units that are up and could serve `request`."""
        return [
            unit
            for unit in self.replicas(request.model)
            if unit in self.up and unit not in request.refused_by and (unit, request.model) not in self._degraded
        ]

    def _choose(self, request: Tracked, last: str = "") -> str:
        """The unit that serves its model with the fewest requests of this gateway; "" if none is up.

        A suspect unit, and the unit `last` whose engines have just died under the request, come last.
        """

        def badness(unit: str) -> tuple[bool, bool, int]:
            return (unit, request.model) in self._suspects, unit == last, self._table.count(unit)

        return min(self.candidates(request), key=badness, default="")

    def _forget(self, request: Tracked) -> None:
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            waiting.due = None

"""Between the models' front ends and the units: follows every request to its end, whoever dies in between.

What to do is decided by `Router`; here are the sockets and the clock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import zmq

from muxserve.gateway.routing.fleet_links import FleetLinks, TokensSocket
from muxserve.gateway.routing.patience import Patience
from muxserve.gateway.routing.predicted_wait import PredictedWaits
from muxserve.gateway.routing.requests import Failure, Output, RequestTable, Tracked
from muxserve.gateway.routing.router import Router
from muxserve.gateway.status.measure import Measures, RequestOutcome
from muxserve.net.logs import of_request
from muxserve.net.peer import AsyncPeer
from muxserve.spec import FleetSpec
from muxserve.wire import (
    Message,
    NotPlaced,
    Placed,
    RequestTrace,
    StateReply,
    StateRequest,
    TimelineReply,
    TimelineRequest,
    TokensHeader,
    Waits,
)

if TYPE_CHECKING:
    from muxserve.gateway.status.tracing import Tracing

log = logging.getLogger(__name__)

T = TypeVar("T")


class UnitQuestions(Generic[T]):
    """Those that wait for an answer of one kind, by unit."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[asyncio.Future[T | None]]] = {}

    async def ask(self, unit: str, send: Callable[[], object], timeout: float) -> T | None:
        """The answer of `unit`; None if there is none within `timeout` seconds.

        Args:
            send: asks; not called while somebody else waits for the answer.
        """
        waiter: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(unit, [])
        waiting.append(waiter)
        if len(waiting) == 1:
            send()
        try:
            async with asyncio.timeout(timeout):
                return await waiter
        except TimeoutError:
            return None
        finally:
            if waiter in waiting:
                waiting.remove(waiter)

    def answer(self, unit: str, answer: T | None) -> None:
        """`unit` has answered, or cannot any more (None)."""
        for waiter in self._waiting.pop(unit, []):
            if not waiter.done():
                waiter.set_result(answer)


CHECK_SECONDS = 0.25
# `Retry-After` for a model that was not ready in time: it may well be soon.
RETRY_AFTER_SECONDS = 5


class FrontEndPort(Protocol):
    """A model's front end, as the broker sees it."""

    def decode(self, frames: list[bytes]) -> tuple[object, list[Output]]:
        """vLLM's `EngineCoreOutputs` of a token message, and the outputs in it."""

    def deliver(self, batch: object, engine: int, outputs: list[Output]) -> None:
        """Hand `outputs` on; `batch` is what they came in."""

    def fail(self, front_id: str, message: str, failure: Failure) -> list[str]:
        """End a request with an error; returns the front ids of all requests that end with it."""


class Broker:
    """Owns the requests and the links of one gateway process.

    Args:
        fleet: the units, and the keys to reach them.
        index: which of the fleet's gateways this is.
        epoch: this process.
        measures: where ends, repetitions and moves are counted.
        waits: hears when prompts are submitted, have their first token, or lose the engine that served them.
        tracing: takes the spans of traced requests.
    """

    def __init__(
        self,
        fleet: FleetSpec,
        index: int,
        epoch: str,
        measures: Measures,
        waits: PredictedWaits | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        self.table = RequestTable(epoch)
        self.router = Router(self.table)
        self.patience = Patience(self.router)
        self.measures = measures
        self.waits = waits or PredictedWaits()
        # Seconds from the arrival of requests to their way to a unit, of the last plain ones.
        self.request_delays: deque[float] = deque(maxlen=256)
        self.tracing = tracing
        self._fleet = fleet
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._tokens = TokensSocket(self._context, epoch, fleet.tokens_address(index), self._take_tokens)
        self._links = FleetLinks(self._context, self._tokens, index, epoch, self)
        self._front_ends: dict[str, FrontEndPort] = {}
        self._states: UnitQuestions[dict[str, object]] = UnitQuestions()
        self._timelines: UnitQuestions[TimelineReply] = UnitQuestions()
        self._timer: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def attach(self, model: str, front_end: FrontEndPort) -> None:
        """Deliver what comes for `model` to `front_end`."""
        self._front_ends[model] = front_end

    def detach(self, model: str) -> None:
        """`model` has no front end any more."""
        self._front_ends.pop(model, None)
        self.patience.forget(model)

    def start(self) -> None:
        """Open the sockets; must be called in the event loop.

        Raises:
            zmq.ZMQError: the address for tokens cannot be bound.
            muxserve.net.sockets.NetworkError: likewise, for units of other machines.
        """
        self._tokens.start()
        self.learn(self._fleet)

    def learn(self, fleet: FleetSpec) -> None:
        """The fleet has changed: link the units that are new, and leave those that are gone.

        Raises:
            muxserve.net.sockets.NetworkError: a unit of another machine cannot be linked, see `start`; all others are.
        """
        self._fleet = fleet
        unreachable = self._links.learn(fleet)
        names = [model.name for model in fleet.models]
        self.router.learn(
            {name: fleet.unit(name).serves for name in self._links.units},
            filter(fleet.placed_by_scheduler, names),
            names,
            time.monotonic(),
            {(each.unit, model) for each in fleet.suspects for model in each.models},
        )
        self.patience.learn({name: rules.wake_limit for name, rules in fleet.scaling.items()})
        self._flush()
        if unreachable is not None:
            raise unreachable

    def close(self) -> None:
        """Cancel what is left and close the sockets."""
        left = self.table.all()
        for request in left:
            self.table.remove(request)
        self.router.cancel(left)
        self._flush()
        for timer in (self._timer, self._deadline):
            if timer is not None:
                timer.cancel()
        self._links.close()
        self._tokens.close()
        self._context.term()

    # ------------------------------------------------------------ from the front ends

    @property
    def scheduler(self) -> AsyncPeer | None:
        """The connection to the global scheduler, where there is something to choose."""
        return self._links.scheduler

    @property
    def scheduler_word(self) -> str:
        """`up` or `down`; `not needed` where there is nothing to choose."""
        if self.scheduler is None:
            return "not needed"
        return "up" if self.router.placing.scheduler_up else "down"

    def unit_is_up(self, unit: str) -> bool:
        """Whether the unit scheduler is there."""
        return unit in self.router.placing.up

    def submit(self, request: Tracked) -> None:
        """Serve a new request."""
        self.waits[request.model].submitted(request.context, request.spec.prompt_tokens)
        if request.choice == 0 and request.context is not None and request.context.tenant is not None:
            request.context.tenant.prompted(request.spec.prompt_tokens)
        now = time.monotonic()
        if request.spec.traced and self.tracing is not None:
            self.tracing.submitted(request, now)
        self.router.submit(request, now)
        self._flush()
        self._look_later()

    def cancel(self, model: str, front_ids: Iterable[str], outcome: Callable[[Tracked], RequestOutcome]) -> None:
        """The front end wants no more of these requests."""
        gone = self.table.cancel(model, front_ids)
        for request in gone:
            self._ended(request, outcome(request), time.monotonic())
        self.router.cancel(gone)
        self._flush()

    def end_all(self, message: str) -> None:
        """End every request with an error."""
        for request in self.table.all():
            # Choices of one prompt end together; the others of this list may be gone already.
            gone = self.table.cancel(request.model, [request.front_id])
            if gone:
                self.router.cancel(gone)
                self._fail(request, message, Failure.AGAIN)
        self._flush()

    async def unit_state(self, unit: str, timeout: float) -> dict[str, object] | None:
        """A unit's state, asked for now; None if it does not answer within `timeout` seconds."""
        link = self._links.units.get(unit)
        if link is None or not link.up:
            return None
        return await self._states.ask(unit, partial(link.send, StateRequest()), timeout)

    async def unit_timeline(self, unit: str, since: float, timeout: float) -> TimelineReply | None:
        """What a unit computed after `since`, seconds of its clock; None if it does not answer within `timeout`
        seconds."""
        link = self._links.units.get(unit)
        if link is None or not link.up:
            return None
        return await self._timelines.ask(unit, partial(link.send, TimelineRequest(since)), timeout)

    async def scheduler_state(self, timeout: float) -> dict[str, object] | None:
        """The global scheduler's state, asked for now; None if it does not answer within `timeout` seconds."""
        link = self.scheduler
        if link is None or not link.up:
            return None
        return await self._states.ask("", partial(link.send, StateRequest()), timeout)

    # ------------------------------------------------------------ from the links

    def unit_up(self, unit: str, epoch: str) -> None:
        """See `Listener`."""
        self.router.unit_up(unit, epoch, time.monotonic())
        self._flush()

    def unit_down(self, unit: str) -> None:
        """See `Listener`."""
        self._states.answer(unit, None)
        self._timelines.answer(unit, None)
        self.router.unit_down(unit, time.monotonic())
        self._flush()

    def unit_said(self, unit: str, message: Message) -> None:
        """See `Listener`."""
        if self.router.take(unit, message, time.monotonic()):
            self._flush()
        elif isinstance(message, StateReply):
            self._states.answer(unit, message.state)
        elif isinstance(message, TimelineReply):
            self._timelines.answer(unit, message)
        elif isinstance(message, RequestTrace):
            if self.tracing is not None:
                self.tracing.left_unit(unit, message, time.monotonic())
        else:
            log.warning("unexpected %s from the unit scheduler of %s", type(message).__name__, unit)

    def scheduler_up(self) -> None:
        """See `Listener`."""
        self.router.placing.scheduler_connected(time.monotonic())
        self._flush()

    def scheduler_down(self) -> None:
        """See `Listener`."""
        self.router.placing.scheduler_gone(time.monotonic())
        self._flush()

    def scheduler_said(self, message: Message) -> None:
        """See `Listener`."""
        match message:
            case Placed():
                self.router.placing.placed(message, time.monotonic())
            case NotPlaced():
                self.router.placing.not_placed(message, time.monotonic())
            case Waits():
                self.router.placing.waits(message)
                request = self.table.get(message.request_id)
                if request is not None and message.asleep:
                    self.waits[request.model].interrupted()
            case StateReply():
                self._states.answer("", message.state)
            case _:
                log.warning("unexpected %s from the global scheduler", type(message).__name__)
        self._flush()

    # ------------------------------------------------------------ from the engines

    def _take_tokens(self, header: TokensHeader, frames: list[bytes]) -> None:
        front_end = self._front_ends.get(header.model)
        if front_end is None:
            log.warning("tokens of unknown model %s", header.model)
            return
        batch, outputs = front_end.decode(frames)
        now = time.monotonic()
        taken = self.table.outputs(header.entries, outputs, now)
        if taken.ready:
            self.patience.moved(header.model, now)
        ready = []
        for request, output in taken.ready:
            ready.append(output)
            if request.first_token_at == now:
                self.waits[request.model].answered(request.context, request.spec.prompt_tokens, now)
            if output.finish_reason is not None:
                self._ended(request, RequestOutcome.of_finish(output.finish_reason), now)
                self.router.finished(request)
        front_end.deliver(batch, header.engine, ready)
        for request in taken.dropped:
            self.router.replace(request, now, "dropped")
        self._flush()

    # ------------------------------------------------------------ inside

    def _ended(self, request: Tracked, outcome: RequestOutcome, now: float) -> None:
        self.measures.ended(request, outcome, now)
        if request.spec.traced and self.tracing is not None:
            self.tracing.ended(request, outcome.value, now)

    def _flush(self) -> None:
        """Do what the router has decided."""
        out = self.router.out
        while out.units or out.scheduler or out.failed or out.again or out.moved:
            units, out.units = out.units, []
            for unit, message in units:
                link = self._links.units.get(unit)
                if link is not None:
                    link.send(message)
            scheduler, out.scheduler = out.scheduler, []
            if self.scheduler is not None:
                for message in scheduler:
                    self.scheduler.send(message)
            again, out.again = out.again, []
            for request, why in again:
                self.measures.resubmitted(request.model, why)
                self.waits[request.model].interrupted()
                if request.spec.traced:
                    request.context.trace.repeated(why)
            moved, out.moved = out.moved, []
            for request, source, destination in moved:
                self.measures.moved(request.model, source, destination)
                if request.spec.traced:
                    request.context.trace.moved(source, destination)
            failed, out.failed = out.failed, []
            for request, text, failure in failed:
                self._fail(request, text, failure)
        if self._deadline is None and (at := self.router.placing.next_deadline) is not None:
            self._deadline = asyncio.get_running_loop().call_later(max(0.0, at - time.monotonic()), self._expire)

    def _expire(self) -> None:
        self._deadline = None
        self.router.placing.expire(time.monotonic())
        self._flush()

    def _fail(self, request: Tracked, message: str, failure: Failure) -> None:
        """End `request`, no longer in the table, and those that share its fate (its siblings when n > 1)."""
        self._ended(
            request, RequestOutcome.REFUSED if failure is Failure.NEVER else RequestOutcome.FAILED, time.monotonic()
        )
        if failure in (Failure.LATE, Failure.DEGRADED) and request.context is not None:
            degraded = failure is Failure.DEGRADED
            after = self.router.placing.retry_after(request.model, time.monotonic()) if degraded else None
            request.context.retry_after = after or RETRY_AFTER_SECONDS
        front_end = self._front_ends.get(request.model)
        others = front_end.fail(request.front_id, message, failure) if front_end is not None else []
        self.cancel(request.model, others, lambda _: RequestOutcome.FAILED)

    def _look_later(self) -> None:
        if self._timer is None and len(self.table):
            self._timer = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._look)

    def _look(self) -> None:
        """Look for requests whose tokens were lost on the way, and for those that have no unit."""
        self._timer = None
        now = time.monotonic()
        for request in self.table.overdue(now):
            log.warning(
                "tokens of request %s were lost on the way; serving it again",
                request.request_id,
                extra=of_request(request.request_id),
            )
            self.router.replace(request, now, "tokens_lost")
        self.router.repeat_quiet(now)
        self.router.placing.retry(now)
        self.patience.expire(now)
        self._flush()
        self._look_later()

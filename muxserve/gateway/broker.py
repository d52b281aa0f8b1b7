"""Between the models' front ends and the unit: follows every request to its end, whoever dies in between."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from muxserve.gateway.link import UnitLink
from muxserve.gateway.measure import Measures, Outcome
from muxserve.gateway.requests import Output, RequestTable, Tracked
from muxserve.wire import Cancel, Lost, Message, Refused, StateRequest, TokensHeader, UnitState

log = logging.getLogger(__name__)

CHECK_SECONDS = 0.25


class FrontEnd(Protocol):
    """A model's front end, as the broker sees it."""

    def decode(self, frames: list[bytes]) -> tuple[object, list[Output]]:
        """vLLM's `EngineCoreOutputs` of a token message, and the outputs in it."""

    def deliver(self, batch: object, engine: int, outputs: list[Output]) -> None:
        """Hand `outputs` on; `batch` is what they came in."""

    def fail(self, front_id: str, message: str, for_good: bool) -> list[str]:
        """End a request with an error; returns the front ids of all requests that end with it.

        Args:
            for_good: the request can never be served (the client's mistake), else it may be tried again.
        """


class Broker:
    """Owns the request table and the link to the unit of one gateway process."""

    def __init__(self, epoch: str, unit_address: str, gateway_address: str, measures: Measures) -> None:
        self.table = RequestTable(epoch)
        self.measures = measures
        self.unit_epoch: str | None = None
        self._front_ends: dict[str, FrontEnd] = {}
        self._cancelled_while_down: list[str] = []
        self._state_waiters: list[asyncio.Future[dict[str, object] | None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self.link = UnitLink(
            epoch,
            unit_address,
            gateway_address,
            on_up=self._unit_up,
            on_down=self._unit_down,
            on_message=self._message,
            on_tokens=self._tokens,
        )

    def attach(self, model: str, front_end: FrontEnd) -> None:
        """Deliver what comes for `model` to `front_end`."""
        self._front_ends[model] = front_end

    def start(self) -> None:
        """Open the sockets; must be called in the event loop."""
        self.link.start()

    def close(self) -> None:
        """Cancel what is left and close the sockets."""
        left = [request.request_id for request in self.table.all()]
        if left and self.link.up:
            self.link.send(Cancel(left))
        if self._timer is not None:
            self._timer.cancel()
        self.link.close()

    # ------------------------------------------------------------ from the front ends

    def submit(self, request: Tracked) -> None:
        """Serve a new request."""
        self.table.add(request)
        if self.link.up:
            self._send(request)
        self._look_later()

    def cancel(self, model: str, front_ids: Iterable[str], outcome: Callable[[Tracked], Outcome]) -> None:
        """The front end wants no more of these requests."""
        gone = self.table.cancel(model, front_ids)
        for request in gone:
            self.measures.ended(request, outcome(request), time.monotonic())
        sent = [request.request_id for request in gone if request.sent]
        if not sent:
            return
        if self.link.up:
            self.link.send(Cancel(sent))
        else:
            self._cancelled_while_down += sent

    def end_all(self, message: str) -> None:
        """End every request with an error."""
        for request in self.table.all():
            # Choices of one prompt end together; the others of this list may be gone already.
            if self.table.cancel(request.model, [request.front_id]):
                if request.sent and self.link.up:
                    self.link.send(Cancel([request.request_id]))
                self._fail(request, message, for_good=False)

    async def unit_state(self, timeout: float) -> dict[str, object] | None:
        """The unit's state, asked for now; None if it does not answer within `timeout` seconds."""
        if not self.link.up:
            return None
        waiter: asyncio.Future[dict[str, object] | None] = asyncio.get_running_loop().create_future()
        self._state_waiters.append(waiter)
        if len(self._state_waiters) == 1:
            self.link.send(StateRequest())
        try:
            return await asyncio.wait_for(waiter, timeout)
        except TimeoutError:
            return None
        finally:
            if waiter in self._state_waiters:
                self._state_waiters.remove(waiter)

    # ------------------------------------------------------------ from the unit scheduler

    def _unit_up(self, epoch: str) -> None:
        if self.unit_epoch is not None and epoch != self.unit_epoch:
            log.warning("a new unit scheduler: submitting %d requests again", len(self.table))
            self._cancelled_while_down.clear()
            self._again(*self.table.unit_restarted(), "unit_restarted", "the unit scheduler died again and again")
        self.unit_epoch = epoch
        if self._cancelled_while_down:
            self.link.send(Cancel(self._cancelled_while_down))
            self._cancelled_while_down = []
        for request in self.table.unsent():
            self._send(request)

    def _unit_down(self) -> None:
        self._answer(None)

    def _message(self, message: Message) -> None:
        match message:
            case Lost():
                log.warning("%d requests lost: %s", len(message.request_ids), message.reason)
                self._again(*self.table.lost(message.request_ids), "engine_lost", message.reason)
            case Refused():
                request = self.table.refused(message.request_id, message.attempt)
                if request is not None:
                    self._fail(request, message.message, for_good=True)
            case UnitState():
                self._answer(message.state)
            case _:
                log.warning("unexpected %s from the unit scheduler", type(message).__name__)

    def _answer(self, state: dict[str, object] | None) -> None:
        waiters, self._state_waiters = self._state_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(state)

    def _again(self, again: list[Tracked], given_up: list[Tracked], why: str, reason: str) -> None:
        for request in again:
            self.measures.resubmitted(request.model, why)
            if self.link.up:
                self._send(request)
            else:
                request.sent = False
        for request in given_up:
            self._fail(
                request,
                f"the request was tried {request.tries} times, and each time whoever served it died ({reason})",
                for_good=False,
            )

    def _fail(self, request: Tracked, message: str, for_good: bool) -> None:
        """End `request`, no longer in the table, and those that share its fate (its siblings when n > 1)."""
        self.measures.ended(request, Outcome.REFUSED if for_good else Outcome.FAILED, time.monotonic())
        others = self._front_ends[request.model].fail(request.front_id, message, for_good)
        self.cancel(request.model, others, lambda _: Outcome.FAILED)

    def _send(self, request: Tracked) -> None:
        request.sent = True
        self.link.send(request.submit())

    # ------------------------------------------------------------ from the engines

    def _tokens(self, header: TokensHeader, frames: list[bytes]) -> None:
        front_end = self._front_ends.get(header.model)
        if front_end is None:
            log.warning("tokens of unknown model %s", header.model)
            return
        batch, outputs = front_end.decode(frames)
        now = time.monotonic()
        taken = self.table.outputs(header.entries, outputs, now)
        ready = []
        for request, output in taken.ready:
            ready.append(output)
            if output.finish_reason is not None:
                self.measures.ended(request, Outcome.of_finish(output.finish_reason), now)
                if request.asked and self.link.up:
                    # The unit may have been asked for it again just when it had finished.
                    self.link.send(Cancel([request.request_id]))
        front_end.deliver(batch, header.engine, ready)
        for request in taken.dropped:
            self._replace(request, "dropped")

    def _look_later(self) -> None:
        if self._timer is None and len(self.table):
            self._timer = asyncio.get_running_loop().call_later(CHECK_SECONDS, self._look)

    def _look(self) -> None:
        """Look for requests whose tokens were lost on the way."""
        self._timer = None
        now = time.monotonic()
        for request in self.table.overdue(now):
            log.warning("tokens of request %s were lost on the way; serving it again", request.request_id)
            self._replace(request, "tokens_lost")
        if self.link.up:
            for request in self.table.quiet(now):
                self._send(request)
        self._look_later()

    def _replace(self, request: Tracked, why: str) -> None:
        """Serve `request` again under a new id, since an engine may still have it under the old one."""
        old_id = request.request_id
        if not self.table.replace(request):
            self._fail(request, "engines dropped the request again and again", for_good=False)
            return
        self.measures.resubmitted(request.model, why)
        if self.link.up:
            self.link.send(Cancel([old_id]))
            self._send(request)
        else:
            self._cancelled_while_down.append(old_id)
            request.sent = False

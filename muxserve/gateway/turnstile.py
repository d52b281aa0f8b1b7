"""The gates of all models, for tasks: wait for one's turn, or be turned away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from http import HTTPStatus

from muxserve.deployment import ModelDeployment
from muxserve.gateway.admission import Gate, Verdict
from muxserve.gateway.body import ClientGoneError, Replay
from muxserve.gateway.errors import RequestError
from muxserve.gateway.measure import Measures


class Turnstile:
    """One gate per model."""

    def __init__(self, models: Iterable[ModelDeployment], measures: Measures) -> None:
        self.gates = {model.name: Gate(model.max_concurrency, model.max_queue) for model in models}
        self._measures = measures
        self._waiting_for_empty: list[asyncio.Future[None]] = []

    @property
    def occupied(self) -> int:
        """Requests in service or waiting, of all models."""
        return sum(gate.inside + gate.waiting for gate in self.gates.values())

    async def empty(self) -> None:
        """Wait until no request is in service or waiting."""
        if self.occupied:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting_for_empty.append(waiter)
            await waiter

    @asynccontextmanager
    async def turn(self, model: str, replay: Replay) -> AsyncIterator[None]:
        """Hold a place at `model` while the block runs.

        Raises:
            RequestError: the queue is full (429).
            ClientGoneError: the client went away while it waited.
        """
        gate = self.gates[model]
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        verdict = gate.arrive(ticket)
        if verdict is Verdict.REFUSE:
            self._measures.rejected(model, "queue_full")
            raise RequestError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"model {model} has {gate.inside} requests in service and {gate.waiting} waiting, which is its limit; "
                "try again later",
                headers=[(b"retry-after", str(gate.retry_after()).encode())],
            )
        if verdict is Verdict.WAIT:
            await self._wait(gate, ticket, replay)
        entered = time.monotonic()
        try:
            yield
        finally:
            self._leave(gate, time.monotonic() - entered)

    async def _wait(self, gate: Gate, ticket: asyncio.Future[None], replay: Replay) -> None:
        gone = replay.watch()
        try:
            await asyncio.wait((ticket, gone), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientGoneError
        except BaseException:
            if not gate.withdraw(ticket):
                self._leave(gate, gate.mean_seconds)  # it had just been let in: let the next one in instead
            raise

    def _leave(self, gate: Gate, seconds: float) -> None:
        ticket = gate.leave(seconds)
        if isinstance(ticket, asyncio.Future) and not ticket.done():
            ticket.set_result(None)
        if self._waiting_for_empty and not self.occupied:
            for waiter in self._waiting_for_empty:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiting_for_empty.clear()

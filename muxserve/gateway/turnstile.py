"""The gates of all models, for tasks: wait for one's turn, or be turned away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from http import HTTPStatus

from muxserve.deployment import ModelDeployment
from muxserve.gateway.admission import Gate, Verdict, part_of
from muxserve.gateway.body import ClientGoneError, Replay
from muxserve.gateway.errors import RequestError
from muxserve.gateway.measure import Measures


class Turnstile:
    """One gate per model.

    Args:
        models: the models.
        index: which gateway this is.
        gateways: among how many gateways their limits are divided; the kernel gives each as many clients.
        measures: where rejections are counted.
    """

    def __init__(self, models: Iterable[ModelDeployment], index: int, gateways: int, measures: Measures) -> None:
        self.gates: dict[str, Gate] = {}
        self._index = index
        self._gateways = gateways
        for model in models:
            self.add(model)
        self._measures = measures
        self._waiting_for_empty: list[tuple[str | None, asyncio.Future[None]]] = []

    def add(self, model: ModelDeployment) -> None:
        """Make a gate for `model`, or give the one it has these limits."""
        limits = model.max_concurrency, model.max_queue
        concurrency, queue = (part_of(limit, self._index, self._gateways) for limit in limits)
        gate = self.gates.get(model.name)
        if gate is None:
            self.gates[model.name] = Gate(concurrency, queue)
        else:
            for ticket in gate.resize(concurrency, queue):
                _enter(ticket)

    async def remove(self, model: str) -> None:
        """Take the gate of `model` away when nobody is in service or waiting at it any more."""
        await self.empty(model)
        del self.gates[model]

    @property
    def occupied(self) -> int:
        """Requests in service or waiting, of all models."""
        return sum(gate.inside + gate.waiting for gate in self.gates.values())

    async def empty(self, model: str | None = None) -> None:
        """Wait until no request, of `model` if it is given, is in service or waiting."""
        if not self._is_empty(model):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting_for_empty.append((model, waiter))
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
        _enter(ticket)
        for entry in [entry for entry in self._waiting_for_empty if self._is_empty(entry[0])]:
            self._waiting_for_empty.remove(entry)
            if not entry[1].done():
                entry[1].set_result(None)

    def _is_empty(self, model: str | None) -> bool:
        if model is None:
            return not self.occupied
        gate = self.gates[model]
        return not gate.inside and not gate.waiting


def _enter(ticket: object) -> None:
    if isinstance(ticket, asyncio.Future) and not ticket.done():
        ticket.set_result(None)

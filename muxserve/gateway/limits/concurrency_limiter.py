"""The gates of all models, for tasks: wait for a place, or be refused."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from http import HTTPStatus

from muxserve.gateway.http.body import BodyReplay, ClientGoneError
from muxserve.gateway.http.errors import RequestError, retry_after
from muxserve.gateway.limits.admission import MAX_RETRY_AFTER_SECONDS, AdmissionVerdict, Gate, part_of
from muxserve.gateway.routing.predicted_wait import PredictedWaits
from muxserve.gateway.status.measure import Measures
from muxserve.spec import ModelSpec


class ConcurrencyLimiter:
    """One gate per model.

    Args:
        models: the models.
        index: which gateway this is.
        gateways: among how many gateways their limits are divided; the kernel gives each as many clients.
        measures: where rejections are counted.
        waits: hears from here of requests that come and go, and from others of their progress.
    """

    def __init__(
        self,
        models: Iterable[ModelSpec],
        index: int,
        gateways: int,
        measures: Measures,
        waits: PredictedWaits | None = None,
    ) -> None:
        self.gates: dict[str, Gate] = {}
        self.waits = waits or PredictedWaits()
        self._index = index
        self._gateways = gateways
        for model in models:
            self.add(model)
        self._measures = measures
        self._waiting_for_empty: list[tuple[str | None, asyncio.Future[None]]] = []

    def add(self, model: ModelSpec) -> None:
        """Make a gate for `model`, or give the one it has these limits."""
        limits = model.max_concurrency, model.max_queue
        concurrency, queue = (part_of(limit, self._index, self._gateways) for limit in limits)
        self.waits.learn(model)
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
        self.waits.forget(model)

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
    async def hold(self, model: str, replay: BodyReplay, prompts: int = 1) -> AsyncIterator[None]:
        """Hold a place at `model` while the block runs, for a request of `prompts` prompts.

        Raises:
            RequestError: the first token would come too late, or the queue is full (429).
            ClientGoneError: the client went away while it waited.
        """
        gate, waits = self.gates[model], self.waits[model]
        rank = replay.http.priority.scheduling_step
        used_by = replay.http.tenant
        tenant, weight = (used_by.name, used_by.weight) if used_by is not None else ("", 1.0)
        wait = waits.refuses(time.monotonic(), rank, tenant)
        if wait is not None:
            self._refuse_late(model, wait)
        ticket: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        verdict = gate.arrive(ticket, prompts, tenant, weight)
        if verdict is AdmissionVerdict.REFUSE:
            self._measures.rejected(model, "queue_full")
            raise RequestError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"model {model} has {gate.inside} requests in service and {gate.waiting} waiting, which is its limit; "
                "try again later",
                headers=[retry_after(gate.retry_after())],
            )
        waits.enter(replay.http, rank, prompts, time.monotonic(), tenant)
        try:
            if verdict is AdmissionVerdict.WAIT:
                await self._wait(gate, ticket, replay, prompts, tenant)
            entered = time.monotonic()
            try:
                yield
            finally:
                self._leave(gate, time.monotonic() - entered, prompts, tenant)
        finally:
            waits.leave(replay.http)

    def _refuse_late(self, model: str, wait: float) -> None:
        self._measures.rejected(model, "predicted_wait")
        longest = self.waits[model].longest or 0.0
        # By then half of what may wait has been worked off, beside all that is too much.
        after = min(MAX_RETRY_AFTER_SECONDS, max(1, math.ceil(wait - longest / 2)))
        raise RequestError(
            HTTPStatus.TOO_MANY_REQUESTS,
            f"model {model} is overloaded: a first token would take about {wait:.1f} s, and {longest:g} s is the "
            "longest wait; try again later",
            headers=[retry_after(after)],
        )

    async def _wait(
        self, gate: Gate, ticket: asyncio.Future[None], replay: BodyReplay, prompts: int, tenant: str
    ) -> None:
        replay.http.waited = True
        gone = replay.watch()
        try:
            await asyncio.wait((ticket, gone), return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientGoneError
        except BaseException:
            if not gate.withdraw(ticket, prompts, tenant):
                self._leave(
                    gate, gate.mean_seconds, prompts, tenant
                )  # it had just been let in: let the next one in instead
            raise

    def _leave(self, gate: Gate, seconds: float, prompts: int, tenant: str) -> None:
        ticket = gate.leave(seconds, prompts, tenant)
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

"""Stands where the unit scheduler and the gateway stand: grants leases to engines and hears their reports."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Iterable
from typing import NamedTuple

import zmq
import zmq.asyncio

from muxserve import wire
from muxserve.net.inbox import Inbox
from muxserve.net.sockets import bind_local
from muxserve.profiling.contention import CoreWaits
from muxserve.profiling.family import StartError
from muxserve.spec import UnitSpec

log = logging.getLogger(__name__)

_EPOCH = "profile"
_ANSWER_SECONDS = 120.0
_LEASE_SECONDS = 60.0


class Heard(NamedTuple):
    """A report and when it came."""

    at: float
    report: wire.StepReport


class PlayedEngine:
    """One engine, as its unit scheduler sees it."""

    def __init__(self, player: Player, model: str, phase: str) -> None:
        self.model = model
        self.phase = phase
        self.reports: asyncio.Queue[Heard | StartError] = asyncio.Queue()
        self.greeted = asyncio.Event()
        self.pid = 0
        self._player = player
        self._waiting: CoreWaits | None = None

    def waiting(self) -> CoreWaits:
        """How long it waits for a core; to be asked once it has greeted."""
        if self._waiting is None:
            self._waiting = CoreWaits(self.pid)
        return self._waiting

    async def lease(self, steps: int, admit: Iterable[wire.Admit] = (), tokens: int = 0) -> float:
        """Grant `steps` steps; returns when that was."""
        lease = wire.Lease(self._player.number(), steps, _LEASE_SECONDS, list(admit), tokens)
        sent = time.monotonic()
        await self._player.send(self, lease)
        return sent

    async def abort(self, request_ids: list[str]) -> None:
        """Drop requests, and wait until the engine says so."""
        await self._player.send(self, wire.Abort(request_ids))
        while not set(request_ids) <= set((await self.heard()).report.finished):
            pass

    async def reset(self) -> None:
        """Have the engine drop every request, and forget what it has reported."""
        await self._player.send(self, wire.Reset(_EPOCH))
        while not self.reports.empty():
            self.reports.get_nowait()

    async def heard(self) -> Heard:
        """The next report.

        Raises:
            StartError: the engine lost its requests, or says nothing for long.
        """
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                answer = await self.reports.get()
        except TimeoutError:
            raise StartError(f"engine {self.model}/{self.phase} said nothing for {_ANSWER_SECONDS:.0f} s") from None
        if isinstance(answer, StartError):
            raise answer
        return answer


class Player:
    """An async context manager, to be entered before the engines start: it is where they connect to."""

    def __init__(self, unit_spec: UnitSpec) -> None:
        self.unit_spec = unit_spec
        # Where the engines push tokens.
        self._reply_to = f"ipc://{unit_spec.socket('gateway')}"
        self.lines = {
            (model.name, phase): PlayedEngine(self, model.name, phase)
            for model in unit_spec.models
            for phase in ("prefill", "decode")
        }
        self._inbox = Inbox(log, wire.decode)
        self._numbers = itertools.count(1)
        self._context = zmq.asyncio.Context()
        self._engines: zmq.asyncio.Socket = self._context.socket(zmq.ROUTER)
        self._tokens: zmq.asyncio.Socket = self._context.socket(zmq.PULL)
        self._readers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Player:
        for socket in (self._engines, self._tokens):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        # An engine that is started again has the name of the one before.
        self._engines.setsockopt(zmq.ROUTER_HANDOVER, 1)
        bind_local(self._engines, self.unit_spec.unit_address)
        bind_local(self._tokens, self._reply_to)
        self._readers = [asyncio.create_task(self._listen()), asyncio.create_task(self._take_tokens())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._context.destroy(linger=0)

    async def greeted(self) -> None:
        """Until every engine has said hello."""
        for line in self.lines.values():
            await line.greeted.wait()

    def number(self) -> int:
        """One that was not given out before."""
        return next(self._numbers)

    def admit(self, body: bytes, max_new: str = "r", hand_over: wire.HandOver | None = None) -> wire.Admit:
        """Take a request in: a new one, or one that a prefill engine has handed over."""
        if hand_over is None:
            number = self.number()
            return wire.Admit(f"{max_new}{number}", number, 1, _EPOCH, self._reply_to, body)
        return wire.Admit(
            hand_over.request_id,
            self.number(),
            1,
            _EPOCH,
            self._reply_to,
            body,
            hand_over.output_tokens,
            wire.HandOff(hand_over.key, hand_over.computed_tokens),
        )

    async def send(self, line: PlayedEngine, message: wire.Message) -> None:
        """To that engine."""
        await self._engines.send_multipart([f"{line.model}/{line.phase}".encode(), wire.encode(message)])

    async def _listen(self) -> None:
        while True:
            peer, frame = await self._engines.recv_multipart()
            at = time.monotonic()
            model, _, phase = peer.decode(errors="replace").rpartition("/")
            line, message = self.lines.get((model, phase)), self._inbox.read(frame, peer)
            if line is None:
                continue
            if isinstance(message, wire.EngineHello):
                await self.send(line, wire.Reset(_EPOCH))
                line.pid = message.pid
                line.greeted.set()
            elif isinstance(message, wire.StepReport):
                line.reports.put_nowait(Heard(at, message))
            elif isinstance(message, wire.EngineLost):
                line.reports.put_nowait(StartError(f"engine {model}/{phase}: {message.reason}"))

    async def _take_tokens(self) -> None:
        while True:
            await self._tokens.recv_multipart()

"""Our end of a forking parent's control socket: orders go out, events of the whole family come in.

The parent is a unit's warm parent or the machine's vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import MutableMapping, Sequence
from typing import Any, Literal

from muxserve.cluster.events import PartId
from muxserve.cluster.processes import Process, exit_words
from muxserve.cluster.supervision import PartDied, PartFailed, while_running
from muxserve.gpu.budget import Needs, measured

log = logging.getLogger(__name__)

_MAX_MESSAGE = 1 << 16
_LAST_WORDS_SECONDS = 0.1


# What a parent hears of a model: its engines have been stopped for good, so that what holds its weights may go; the
# host's memory has a copy of its weights, which is to be pinned; or has none any more.
ModelNews = Literal["end", "pin", "forget"]


class Birth:
    """One order to fork a part: resolves to its pid, then to its being up."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.forked: asyncio.Future[int] = loop.create_future()
        # Whether what it has made stays without it.
        self.up: asyncio.Future[bool] = loop.create_future()

    async def process(self, exits: MutableMapping[int, int], known: Process | None = None) -> Process:
        """The process, when it has been forked. It may be one that is `known`.

        Args:
            exits: return codes of processes that are not our children, as they are reported.

        Raises:
            PartDied, PartFailed: there is none, or it has ended.
        """
        pid = await self.forked
        try:
            process = known if known is not None and known.pid == pid and known.running else Process(pid)
        except ProcessLookupError:
            raise PartDied(exit_words(exits.get(pid))) from None
        exits.pop(pid, None)  # of an earlier process with that pid
        return process

    async def until_up(self, process: Process) -> bool:
        """Until it serves; whether what it has made stays without it.

        Raises:
            PartDied, PartFailed: it does not come up; what it said just before its end is the reason.
        """
        try:
            return await while_running(process, asyncio.shield(self.up))
        except PartDied:
            await asyncio.wait([self.up], timeout=_LAST_WORDS_SECONDS)
            if self.up.done():
                self.up.result()
            raise

    def fail(self, error: Exception) -> None:
        """Whoever waits gets `error`."""
        for future in (self.forked, self.up):
            if not future.done():
                future.set_exception(error)
                future.exception()  # nobody may be waiting for this one


class ParentEvents:
    """Hears what a parent says of the processes that come of it. Those who fork neither holders nor engines do not
    override the last two."""

    def on_progress(self, part: PartId, detail: str) -> None:
        """What a part says of its start."""

    def on_exited(self, pid: int, status: int) -> None:
        """A process has ended, with a return code as in `subprocess`."""

    def on_measured(self, needs: Needs) -> None:
        """A weight holder has measured its model."""

    def on_model_parent(self, model: str, pid: int) -> None:
        """A process has begun to load a model, to fork its engines."""


class WarmLink:
    """Lives as long as one parent.

    Args:
        parent: which part the parent is.
    """

    def __init__(self, parent: PartId, events: ParentEvents) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.ours.setblocking(False)
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._parent = parent
        self._births: dict[PartId, Birth] = {}
        self._model_parents: dict[int, str] = {}
        # By engine, what waits for it to rest.
        self._resting: dict[PartId, asyncio.Future[None]] = {}
        self._events = events
        self._reader = asyncio.create_task(self._read())

    def order(self, part: PartId, fds: Sequence[int] = (), **more: str) -> Birth:
        """Have `part` forked; `fds` are open in it, and `more` is what it is told besides.

        Raises:
            PartDied: the parent is gone.
        """
        birth = self._births[part] = Birth()
        command = {"op": "fork", "kind": part.kind, "model": part.model, "phase": part.phase}
        self._command({**command, "unit": part.unit, "index": part.index, **more}, fds)
        return birth

    def serve(self) -> None:
        """The parent, a spare one until now, is to serve.

        Raises:
            PartDied: it is gone.
        """
        self._command({"op": "serve"})

    def tell(self, what: ModelNews, model: str) -> None:
        """Tell the parent what a model is about to do, if it lives."""
        with contextlib.suppress(PartDied):
            self._command({"op": what, "model": model})

    async def rest(self, part: PartId) -> None:
        """The model of the engine `part` sleeps, and the engine stays without the weights until it is ordered again.

        Raises:
            PartFailed: it cannot.
            PartDied: the parent is gone.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._resting[part] = future
        try:
            self._command({"op": "rest", "model": part.model, "phase": part.phase})
            await future
        finally:
            self._resting.pop(part, None)

    def _command(self, command: dict[str, object], fds: Sequence[int] = ()) -> None:
        data = json.dumps(command).encode()
        try:
            if fds:
                socket.send_fds(self.ours, [data], fds)
            else:
                self.ours.send(data)
        except OSError as error:
            raise PartDied(f"{self._parent} does not take orders: {error}", blameless=True) from None

    async def close(self) -> None:
        """Close the socket; whoever still waits for a part is told that the parent died."""
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._lost()
        self.ours.close()

    def _lost(self) -> None:
        gone = PartDied(f"{self._parent} died", blameless=True)
        for birth in self._births.values():
            birth.fail(gone)
        self._births.clear()
        for future in self._resting.values():
            if not future.done():
                future.set_exception(gone)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                data = await loop.sock_recv(self.ours, _MAX_MESSAGE)
            except OSError:
                data = b""
            if not data:
                return
            try:
                self._handle(json.loads(data))
            except (ValueError, KeyError, TypeError) as error:
                log.warning("a message that is none from %s: %r (%s)", self._parent, data[:200], error)

    def _handle(self, message: dict[str, Any]) -> None:
        event = message["event"]
        if event == "exited":
            self._exited(int(message["pid"]), int(message["status"]))
        elif event == "ready" or (event == "failed" and message["kind"] == self._parent.kind):
            if not self.ready.done():
                _resolve(self.ready, message)
        elif event == "forked" and message["kind"] == "model":
            self._model_parents[int(message["pid"])] = message["model"]
            self._events.on_model_parent(message["model"], int(message["pid"]))
        elif event == "measured":
            self._events.on_measured(measured(message))
        else:
            names = {name: message[name] for name in ("model", "phase", "unit", "index") if name in message}
            self._of_part(PartId(message["kind"], **names), event, message)

    def _of_part(self, part: PartId, event: str, message: dict[str, Any]) -> None:
        if event == "progress":
            self._events.on_progress(part, str(message["detail"]))
        elif future := self._resting.get(part):
            if event in ("rests", "failed") and not future.done():
                _resolve(future, message)
        elif birth := self._births.get(part):
            if event == "failed":
                birth.fail(PartFailed(str(message["error"])))
            elif event in ("forked", "up") and not birth.forked.done():  # the child may be quicker than its parent
                birth.forked.set_result(int(message["pid"]))
            if event == "up" and not birth.up.done():
                birth.up.set_result(bool(message.get("kept")))

    def _exited(self, pid: int, status: int) -> None:
        model = self._model_parents.pop(pid, None)
        if model is not None:
            # Its engines die with it; those that it has not forked yet would never come.
            for part, birth in self._births.items():
                if part.model == model:
                    birth.fail(PartDied(f"the process that loads {model} died"))
        self._events.on_exited(pid, status)


def _resolve(future: asyncio.Future[None], message: dict[str, Any]) -> None:
    """Say that something has been done, or why not."""
    if "error" in message:
        future.set_exception(PartFailed(str(message["error"])))
    else:
        future.set_result(None)

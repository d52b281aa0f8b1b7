"""What the servers of the fleet have in common that are a ROUTER and a loop: the unit scheduler, the global scheduler
and the migrator. They take in every message that is there, decide once, and send."""

from __future__ import annotations

import argparse
import gc
import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec
import zmq

from muxserve.net.heartbeat import PERIOD_SECONDS, Heartbeat
from muxserve.net.inbox import Inbox
from muxserve.net.logs import LEVELS, log_to_stderr
from muxserve.net.peer import received
from muxserve.net.process import Signals, die_with_parent
from muxserve.net.sockets import NetworkError, bind_local, bind_tcp, tcp_address
from muxserve.spec import Keys
from muxserve.wire import AnyMessage, Message, decode, encode

log = logging.getLogger(__name__)

S = TypeVar("S")


def bound_router(context: zmq.Context[Any], address: str, tcp: tuple[str, int, Keys] | None = None) -> zmq.Socket[Any]:
    """A ROUTER for processes of this machine at `address` and, if `tcp` has host, port and keys, of other machines.

    Raises:
        NetworkError: the TCP address cannot be listened on.
        zmq.ZMQError: `address` cannot be.
    """
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.sndhwm = router.rcvhwm = 0
    # One that is gone is found out when it is sent to; one that was started again takes over its identity.
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.ROUTER_HANDOVER, 1)
    try:
        bind_local(router, address)
        if tcp is not None:
            log.info("other machines reach it at %s", tcp_address(tcp[0], bind_tcp(router, *tcp)))
    except Exception:
        router.close()
        raise
    return router


class RouterLoop:
    """A ROUTER, and the poller that waits for it and for whatever else is registered there.

    Args:
        signals: SIGTERM and SIGINT end the loop.
        heartbeat: the file that it beats in.
        address: of the ROUTER, for processes of this machine.
        tcp: host, port and keys, where processes of other machines reach it as well.
        on_hangup: called at SIGHUP.

    Raises:
        NetworkError: the TCP address cannot be listened on.
        zmq.ZMQError: `address` cannot be.
    """

    def __init__(
        self,
        signals: Signals,
        heartbeat: Path,
        address: str,
        tcp: tuple[str, int, Keys] | None = None,
        on_hangup: Callable[[], None] = lambda: None,
    ) -> None:
        self.context: zmq.Context[zmq.Socket[Any]] = zmq.Context()
        self.context.setsockopt(zmq.MAX_SOCKETS, 65535)
        self.poller = zmq.Poller()
        self.inbox = Inbox(log, decode)
        self.router = bound_router(self.context, address, tcp)
        self.poller.register(self.router, zmq.POLLIN)
        self.poller.register(signals.fileno(), zmq.POLLIN)
        self._signals = signals
        self._on_hangup = on_hangup
        self._heartbeat = Heartbeat(heartbeat)

    def wait(self, due: float) -> dict[Any, int] | None:
        """Beat, and wait until something has come or it is `due` (monotonic seconds); what the poller found. None: it
        is time to end."""
        self._heartbeat.beat()
        wait = min(max(due - time.monotonic(), 0.0), PERIOD_SECONDS)
        # Rounded up: waking a little early would only mean to wait again.
        ready: dict[Any, int] = dict(self.poller.poll(math.ceil(wait * 1000)))
        if self._signals.fileno() in ready:
            signals = self._signals.take()
            if signals & {signal.SIGTERM, signal.SIGINT}:
                log.info("stopped")
                return None
            if signal.SIGHUP in signals:
                self._on_hangup()
        return ready

    def messages(self) -> Iterator[tuple[bytes, AnyMessage]]:
        """What has come to the ROUTER, each with the identity of its sender: enough to decide on a burst as a whole,
        few enough to be quick."""
        for frames in received(self.router):
            message = self._read(frames, len(frames) == 2)
            if message is not None:
                yield frames[0], message

    def messages_with_data(self) -> Iterator[tuple[bytes, AnyMessage, memoryview | None]]:
        """As `messages`, where a message may come with data, which is not copied."""
        for found in received(self.router, copy=False):
            frames = [found[0].bytes, *(each.bytes for each in found[1:2])]
            message = self._read(frames, len(found) in (2, 3))
            if message is not None:
                yield frames[0], message, found[2].buffer if len(found) == 3 else None

    def send(self, peer: bytes, message: Message) -> bool:
        """Send; false if there is nobody of that identity (any more)."""
        try:
            self.router.send_multipart((peer, encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.debug("%r is not there to be told of %s: %s", peer, type(message).__name__, error)
            return False
        return True

    def close(self, linger: int = 0) -> None:
        """Close the ROUTER and the context, in which nothing else is open any more. What was sent last still goes out
        within `linger` milliseconds."""
        self.router.close(linger=linger)
        self.context.term()

    def _read(self, frames: list[bytes], whole: bool) -> AnyMessage | None:
        peer = frames[0]
        if not whole or not frames[1]:
            self.inbox.drop("frames", f"a message from {shown(peer)} that is not made of one frame ignored")
            return None
        return self.inbox.read(frames[1], peer)


def shown(peer: bytes) -> str:
    """A peer's identity for people; identities that ZeroMQ made up are not text."""
    return peer.decode(errors="backslashreplace")


class Runnable(Protocol):
    """What such a program runs."""

    def run(self) -> None:
        """Serve until it is told to end."""

    def close(self) -> None:
        """Let go of everything."""


@dataclass(frozen=True, slots=True)
class ServerProgram(Generic[S]):
    """A server's command line: `python -m MODULE --OPTION PATH`.

    Args:
        option: names the file with its spec, which `load` reads; `what` that is.
        address: where it listens, for a message that it cannot.
        make: raises ValueError where the spec contradicts itself, `zmq.ZMQError` and `NetworkError` where an address
            cannot be listened on.
        signals: those that it expects.
    """

    module: str
    description: str
    option: str
    what: str
    load: Callable[[str], S]
    address: Callable[[S], str]
    make: Callable[[S, str, Signals], Runnable]
    signals: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT)

    def main(self, arguments: list[str] | None = None) -> int:
        """Entry point; returns the exit status: 0 stopped, 2 bad input, 3 could not start."""
        parser = argparse.ArgumentParser(prog=f"python -m {self.module}", description=self.description)
        parser.add_argument(f"--{self.option}", dest="path", required=True, help="file written by the controller")
        parser.add_argument(
            "--die-with-parent", action="store_true", help="stop when the process that started this ends"
        )
        parser.add_argument("--log-level", default="", choices=LEVELS)
        options = parser.parse_args(arguments)
        if options.die_with_parent and not die_with_parent():
            return 0
        log_to_stderr(options.log_level)
        # From the first moment on: one that is not expected would end the process.
        signals = Signals(self.signals)
        try:
            spec = self.load(options.path)
        except (OSError, msgspec.DecodeError) as error:
            print(f"{options.path}: not {self.what}: {error}", file=sys.stderr)
            return 2
        try:
            server = self.make(spec, options.path, signals)
        except ValueError as error:
            print(f"{options.path}: {error}", file=sys.stderr)
            return 2
        except zmq.ZMQError as error:
            print(f"cannot listen on {self.address(spec)}: {error}", file=sys.stderr)
            return 3
        except NetworkError as error:
            print(f"{options.path}: {error}", file=sys.stderr)
            return 3
        try:
            # What exists now stays; looking at it again and again would only lengthen the pauses.
            gc.collect()
            gc.freeze()
            server.run()
        finally:
            server.close()
            # What is frozen would not be collected at the interpreter's end either, nor what it has come to refer to:
            # memory that is mapped would be reported as leaked.
            gc.unfreeze()
        return 0

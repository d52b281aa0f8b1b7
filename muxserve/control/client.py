"""The commands' side: finds the fleet that runs here, sends it one command, and hears what becomes of it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import zmq

from muxserve.control import messages
from muxserve.net.sockets import connect
from muxserve.spec import FleetSpec, load_fleet
from muxserve.spec.fleet import FILE
from muxserve.spec.run_dir import default_base
from placement.format import enumerate_words

_LOCK = "lock"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_POLL_MS = 500
# A controller answers at once that it is there, whatever else it does; a busy machine may take its time.
_THERE_SECONDS = 10.0


class NoFleetError(Exception):
    """There is no fleet to talk to, or it is not clear which; the message says what to do."""


class FleetEndedError(NoFleetError):
    """The fleet ended while a command waited for it."""


@dataclass(frozen=True)
class RunningFleet:
    """A fleet whose controller lives."""

    path: Path

    @property
    def name(self) -> str:
        """What it is called: the name of its directory."""
        return self.path.name

    @property
    def alive(self) -> bool:
        """Whether its controller still has the lock of its directory."""
        try:
            lock = os.open(self.path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(lock)
        return False

    @property
    def pid(self) -> int | None:
        """The controller's process, as long as it lives; None if it does not say that."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.path / _LOCK).read_text())
        return None

    @property
    def began(self) -> float:
        """When it was started (Unix time); 0 once it has ended."""
        try:
            return (self.path / _LOCK).stat().st_mtime
        except OSError:
            return 0.0

    def spec(self) -> FleetSpec | None:
        """What its file says; None if it cannot be read (any more)."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return load_fleet(self.path / FILE)
        return None

    def __str__(self) -> str:
        fleet = self.spec()
        if fleet is None:
            return self.name
        models = ", ".join(model.name for model in fleet.models)
        return f"{self.name} (port {fleet.gateway.port}: {models})"


def running_fleets(base: Path | None = None) -> list[RunningFleet]:
    """The fleets of this user on this machine whose controllers have written down what they are."""
    try:
        # The lock is taken before the file is there, so that asking for it never gets in the way of a start.
        found = [RunningFleet(file.parent) for file in sorted((base or default_base()).glob(f"*/{FILE}"))]
    except OSError:
        return []
    return [fleet for fleet in found if fleet.alive]


def find(wanted: str | None, base: Path | None = None) -> RunningFleet:
    """The fleet `wanted`, by its ID, its port, or the URL of its endpoint; or the only one.

    Raises:
        NoFleetError: there is no such fleet here, or there are several.
    """
    fleets = running_fleets(base)
    if not fleets:
        raise NoFleetError(
            f"no fleet runs here (looked in {base or default_base()}); start one with `muxserve deploy`, and give this "
            "command as the same user on the same machine"
        )
    listed = enumerate_words([str(fleet) for fleet in fleets])
    if wanted is not None:
        named = [fleet for fleet in fleets if fleet.name == wanted] or _listening(fleets, wanted)
        if not named:
            raise NoFleetError(f"there is no fleet {wanted} on this machine; running: {listed}")
        # While one takes over from another, both listen at the same port.
        fleets, listed = named, enumerate_words([str(fleet) for fleet in named])
    if len(fleets) > 1:
        raise NoFleetError(f"several fleets run here; say which with --fleet: {listed}")
    return fleets[0]


def _listening(fleets: Sequence[RunningFleet], wanted: str) -> list[RunningFleet]:
    """Those of the fleets that listen at a port, or at the port of a URL of this machine."""
    try:
        host = wanted if ":" in wanted else f"127.0.0.1:{wanted}"
        url = urlsplit(wanted if "://" in wanted else f"http://{host}")
        port = url.port or {"http": 80, "https": 443}.get(url.scheme)
    except ValueError:
        return []
    specs = [(fleet, spec) for fleet in fleets if (spec := fleet.spec()) is not None and spec.gateway.port == port]
    here = {*_LOOPBACK, socket.gethostname().lower()}
    return [fleet for fleet, spec in specs if url.hostname in {*here, spec.gateway.host.lower()}]


class ControlClient:
    """A connection to one fleet's controller. A context manager."""

    def __init__(self, fleet: RunningFleet) -> None:
        self._fleet = fleet
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        # As `FleetSpec.control_address` has it.
        connect(self._socket, f"ipc://{fleet.path}/control.sock")

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def who(self) -> messages.Here:
        """What the fleet is.

        Raises:
            NoFleetError: it does not answer.
        """
        answer = self._ask(messages.Who(), lambda text: None, _THERE_SECONDS)
        if not isinstance(answer, messages.Here):
            raise NoFleetError(f"the fleet {self._fleet.name} answers in another language; is it of another version?")
        return answer

    def do(self, command: messages.Command, told: Callable[[str], None]) -> messages.Done | messages.CommandRefused:
        """Have a change made, however long that takes.

        Args:
            told: called with what is being done.

        Raises:
            NoFleetError: the fleet does not answer.
            FleetEndedError: it ended meanwhile.
        """
        self.who()
        answer = self._ask(command, told, None)
        assert not isinstance(answer, messages.Here), "only Who is answered by that"
        return answer

    def _ask(
        self, command: messages.Command, told: Callable[[str], None], seconds: float | None
    ) -> messages.Here | messages.Done | messages.CommandRefused:
        deadline = None if seconds is None else time.monotonic() + seconds
        self._socket.send(messages.encode(command))
        while True:
            if self._socket.poll(_POLL_MS):
                try:
                    answer = messages.decode_answer(self._socket.recv())
                except msgspec.DecodeError as error:
                    text = (
                        f"the fleet {self._fleet.name} answers something unknown ({error}); is it of another version?"
                    )
                    raise NoFleetError(text) from None
                if not isinstance(answer, messages.ChangeProgress):
                    return answer
                told(answer.text)
            elif not self._fleet.alive:
                raise FleetEndedError(f"the fleet {self._fleet.name} has ended")
            elif deadline is not None and time.monotonic() >= deadline:
                raise NoFleetError(
                    f"the fleet {self._fleet.name} does not answer; it is still starting, or is being stopped"
                )

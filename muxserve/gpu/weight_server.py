"""Who hands a model's weights on one GPU out to its engines: the process that holds them, or the controller, which
keeps the descriptors of exported memory for one that has ended."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from muxserve.gpu import weight_wire as wire

log = logging.getLogger(__name__)

# A peer that connects and says nothing must not keep others waiting.
_PATIENCE_SECONDS = 10.0


@dataclass(slots=True)
class HostCopy:
    """A model's weights on one GPU as bytes in the host's memory: `files` has one for each piece of exported memory."""

    fingerprint: dict[str, str]
    weights: wire.Weights
    files: list[int]

    @property
    def bytes(self) -> int:
        """What it takes."""
        return sum(each.size for each in self.weights.allocations)

    def close(self) -> None:
        """Give the memory back."""
        wire.close_all(self.files)
        self.files = []


class WeightServer:
    """Answers on a Unix socket that only its owner may reach, in a thread of its own.

    Args:
        path: of the socket; what somebody left there is replaced.
        fingerprint: what an asker must have in common with `weights`.
        weights: what is handed out; None until somebody has these kept.
        on_lost: called (in the thread) with why the kept weights have been lost. Without it nothing is taken to be
            kept.
        copy: what is known of the weights in the host's memory, for who copies them back; another one that comes with
            what is kept takes its place. `close` leaves it to the caller.
    """

    def __init__(
        self,
        path: str,
        fingerprint: dict[str, str] | None = None,
        weights: wire.Weights | None = None,
        on_lost: Callable[[str], None] | None = None,
        copy: HostCopy | None = None,
    ) -> None:
        self.copy = copy
        self._fingerprint = fingerprint or {}
        self._weights = weights
        self._on_lost = on_lost
        self._descriptors: Sequence[int] = ()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Connected to only when complete: bound under another name, then moved into place.
        temporary = f"{path}.new"
        for each in (temporary, path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(each)
        self._socket.bind(temporary)
        os.chmod(temporary, 0o600)
        self._socket.listen(64)
        os.rename(temporary, path)
        self._thread = threading.Thread(target=self._serve, name="weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering, and let go of what is kept: memory that nobody has mapped is free then."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()
        self._forget()

    def wait(self) -> None:
        """Until it is closed."""
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            with peer:
                peer.settimeout(_PATIENCE_SECONDS)
                try:
                    self._answer(peer, wire.receive(peer))
                except (OSError, ValueError) as error:
                    log.warning("a request for weights came to nothing: %s", error)

    def _answer(self, peer: socket.socket, message: wire.Message) -> None:
        if isinstance(message, wire.Ask):
            answer = self._asked(message)
            wire.send(peer, answer, self._descriptors if isinstance(answer, wire.Weights) else ())
        elif isinstance(message, wire.Keep) and self._on_lost is not None:
            count = message.weights.descriptors
            kept = wire.receive_descriptors(peer, 2 * count if message.copied else count)
            if message.copied:
                if self.copy is not None:
                    self.copy.close()
                self.copy = HostCopy(message.fingerprint, message.weights, kept[count:])
                kept = kept[:count]
            self._forget()
            self._fingerprint, self._weights, self._descriptors = message.fingerprint, message.weights, kept
            wire.send(peer, wire.WeightsTaken())
        elif isinstance(message, wire.AskCopy) and self._on_lost is not None:
            if self.copy is None:
                wire.send(peer, wire.WeightsRefused("there is no copy of the weights"))
            else:
                wire.send(peer, wire.Copied(self.copy.fingerprint, self.copy.weights), self.copy.files)
        elif isinstance(message, wire.WeightsLost) and self._on_lost is not None:
            # Both engines of a model may find it out.
            known = self._weights is not None
            self._forget()
            if known:
                self._on_lost(message.reason)
            wire.send(peer, wire.WeightsTaken())
        else:
            wire.send(peer, wire.WeightsRefused(f"{type(message).__name__} is not for this side"))

    def _asked(self, message: wire.Ask) -> wire.Weights | wire.WeightsRefused:
        if self._weights is None:
            return wire.WeightsRefused("there are no weights yet")
        names = sorted({*self._fingerprint, *message.fingerprint})
        differ = [
            f"{name}: held {self._fingerprint.get(name)!r}, wanted {message.fingerprint.get(name)!r}"
            for name in names
            if self._fingerprint.get(name) != message.fingerprint.get(name)
        ]
        if differ:
            return wire.WeightsRefused(
                f"the weights that are held do not fit this engine ({'; '.join(differ)}); restart the fleet"
            )
        return self._weights

    def _forget(self) -> None:
        wire.close_all(self._descriptors)
        self._descriptors, self._weights = (), None

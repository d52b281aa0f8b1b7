"""The side of a holder that hands out the handles of its weights."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading

from muxserve.engine.cuda import weight_wire as wire

log = logging.getLogger(__name__)

# A peer that connects and says nothing must not keep others waiting.
_PATIENCE_SECONDS = 10.0


class WeightServer:
    """Answers every `Ask` on a Unix socket that only its owner may reach, in a thread of its own.

    Args:
        path: of the socket; what a dead holder left there is replaced.
        fingerprint: what an asker must have in common with `weights`.
    """

    def __init__(self, path: str, fingerprint: dict[str, str], weights: wire.Weights) -> None:
        self._fingerprint = fingerprint
        self._weights = weights
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
        """Stop answering."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
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
                    wire.send(peer, self._answer(wire.receive(peer)))
                except (OSError, ValueError) as error:
                    log.warning("a request for weights came to nothing: %s", error)

    def _answer(self, message: wire.Message) -> wire.Message:
        if not isinstance(message, wire.Ask):
            return wire.WeightsRefused(f"{type(message).__name__} is not a question")
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

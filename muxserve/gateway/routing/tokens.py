"""Where engines push tokens: one socket per gateway, for the engines of all units."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import zmq

from muxserve.net.inbox import Inbox
from muxserve.net.reader import Reader
from muxserve.net.sockets import bind_local, bind_tcp, tcp_address
from muxserve.spec import Keys
from muxserve.wire import TokensHeader, decode

log = logging.getLogger(__name__)


class TokensSocket:
    """Takes the tokens meant for this gateway process.

    Args:
        context: of the socket.
        epoch: this gateway process.
        address: for engines of this machine, `ipc://...`.
        on_tokens: called with each token message: header, and the frames of vLLM's encoding.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        epoch: str,
        address: str,
        on_tokens: Callable[[TokensHeader, list[bytes]], None],
    ) -> None:
        self.address = address
        self.tcp_address = ""
        self._context = context
        self._inbox = Inbox(log, decode)
        self._epoch = epoch
        self._on_tokens = on_tokens
        self._socket: zmq.Socket[bytes] | None = None
        self._reader: Reader | None = None

    def start(self) -> None:
        """Open the socket; must be called in the event loop.

        Raises:
            zmq.ZMQError: the address cannot be bound.
            muxserve.net.sockets.NetworkError: the run's secret cannot be read.
        """
        self._socket = self._context.socket(zmq.PULL)
        self._socket.rcvhwm = 0
        Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)
        bind_local(self._socket, self.address)
        self._reader = Reader(self._socket, self._take, self._inbox, "an engine")

    def open_tcp(self, host: str, keys: Keys) -> str:
        """Let engines of other machines in as well; the address under which they reach it.

        Raises:
            muxserve.net.sockets.NetworkError: `host` is no address of this machine.
        """
        if not self.tcp_address:
            assert self._socket is not None
            self.tcp_address = tcp_address(host, bind_tcp(self._socket, host, 0, keys))
        return self.tcp_address

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None and self._reader is not None:
            self._reader.close()
            self._socket.close(linger=0)
            self._socket = None

    def _take(self, frames: list[bytes]) -> None:
        header = self._inbox.read(frames[0], "an engine")
        if header is None:
            return
        if not isinstance(header, TokensHeader):
            self._inbox.drop("unexpected", f"unexpected {type(header).__name__} among the tokens")
        elif header.gateway_epoch == self._epoch:
            self._on_tokens(header, frames[1:])

"""Keeps descriptors of GPU memory while the memory manager is dead, so that the next one takes the same memory up.

The other side is `memory_manager/src/fd_store.hpp`, which tells the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

_MAX_MESSAGE = 4096


class FdStore:
    """Descriptors by name. Answers its manager from the running event loop; nothing blocks."""

    def __init__(self) -> None:
        self._kept: dict[str, int] = {}
        self._ours: socket.socket | None = None
        self._theirs: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What is kept."""
        return tuple(self._kept)

    def open_child(self) -> int:
        """A socket for the manager that is started next, to be inherited by it; that of the one before is closed, with
        what it had not read. It stays open here until the next call or `close`."""
        self._hang_up()
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ours, self._readable)
        return self._theirs.fileno()

    def close(self) -> None:
        """Let go of everything: memory that nobody has mapped is free then."""
        self._hang_up()
        for fd in self._kept.values():
            os.close(fd)
        self._kept.clear()

    def _hang_up(self) -> None:
        if self._ours is not None and self._loop is not None:
            # What the last manager said before it died still counts.
            self._readable()
        if self._ours is not None and self._loop is not None:
            self._loop.remove_reader(self._ours)
        for end in (self._ours, self._theirs):
            if end is not None:
                end.close()
        self._ours = self._theirs = None

    def _readable(self) -> None:
        assert self._ours is not None
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._ours, _MAX_MESSAGE, 1)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self._stop_listening()
                return
            self._handle(data.decode(errors="replace"), fds)

    def _stop_listening(self) -> None:
        if self._ours is not None and self._loop is not None:
            self._loop.remove_reader(self._ours)
            self._ours.close()
            self._ours = None

    def _handle(self, text: str, fds: list[int]) -> None:
        what, _, name = text.partition(" ")
        if what == "KEEP" and name and fds:
            self._forget(name)
            self._kept[name] = fds.pop()
        elif what == "FORGET":
            self._forget(name)
        elif what == "LIST":
            self._list()
        for fd in fds:
            os.close(fd)

    def _list(self) -> None:
        assert self._ours is not None
        # A manager that does not read what it asked for has died; it is not waited for.
        with contextlib.suppress(OSError):
            for name, fd in self._kept.items():
                socket.send_fds(self._ours, [f"HAVE {name}".encode()], [fd])
            self._ours.send(b"END")

    def _forget(self, name: str) -> None:
        fd = self._kept.pop(name, None)
        if fd is not None:
            os.close(fd)

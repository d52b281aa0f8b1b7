"""An engine that stays while its model sleeps.

What takes long when an engine starts on a GPU is vLLM: its configuration, compiled code, CUDA graphs. None of that
changes when a model sleeps and is woken again. So the engine lets go of the weights and of its place in the unit,
waits, and takes both again. To the unit scheduler it has ended and started anew.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

REST, WAKE = b"rest", b"wake"
_LONGEST = 16


class RestOrders:
    """The engine's end of the socket (SEQPACKET) on which it is told to rest and to come back.

    Args:
        orders: the socket.
        on_rest: called when the engine rests.
    """

    def __init__(self, orders: socket.socket, on_rest: Callable[[], None]) -> None:
        self._orders = orders
        self.on_rest = on_rest

    def fileno(self) -> int:
        return self._orders.fileno()

    def received(self, order: bytes, milliseconds: int = 0) -> bool:
        """Whether that order has come, after waiting so long for it at most; any other is dropped."""
        poll = select.poll()
        poll.register(self._orders, select.POLLIN)
        if not poll.poll(milliseconds):
            return False
        said = self._orders.recv(_LONGEST)
        if not said:
            # Who gives orders is gone, and this process about to end with it.
            raise ConnectionError("the process that this engine was forked from has closed its socket")
        return said == order

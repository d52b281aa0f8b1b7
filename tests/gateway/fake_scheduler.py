"""A global scheduler that places requests as a test says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from muxserve.net import sockets
from muxserve.wire import Message, NotPlaced, Place, Placed, Unplace, decode, encode

Answer = Callable[[Place], Message | None]


class FakeScheduler:
    """Answers in a thread of its own until it is closed. `places` are the requests that it was asked for."""

    def __init__(self, address: str, answer: Answer) -> None:
        self.places: list[Place] = []
        self.unplaced: list[str] = []
        self._answer = answer
        self._context: zmq.Context[Any] = zmq.Context()
        Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        sockets.bind_local(self._router, address)
        self._end = self._context.socket(zmq.PULL)
        self._end.bind("inproc://end")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __enter__(self) -> FakeScheduler:
        return self

    def __exit__(self, *_: object) -> None:
        with self._context.socket(zmq.PUSH) as end:
            end.connect("inproc://end")
            end.send(b"")
            self._thread.join()
        self._router.close()
        self._end.close()
        self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._end, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._end in ready:
                return
            peer, frame = self._router.recv_multipart()
            match decode(frame):
                case Place() as place:
                    self.places.append(place)
                    answer = self._answer(place)
                    if answer is not None:
                        self._router.send_multipart([peer, encode(answer)])
                case Unplace() as unplace:
                    self.unplaced += unplace.request_ids


def at(unit: str) -> Answer:
    """Every request goes to `unit`."""
    return lambda place: Placed(place.request_id, unit)


def nowhere(late: bool) -> Answer:
    """There is no replica, or none that is large enough."""
    return lambda place: NotPlaced(place.request_id, "nobody can serve this", late)

"""Changes of the running fleet over HTTP: passed on to the controller, as the commands do over its Unix socket.

    POST /admin/scale   {"model": NAME, "replicas": N}
    POST /admin/drain   {"unit": NAME}
    POST /admin/remove  {"model": NAME}

Only with a key of an admin: whoever reaches the port of a fleet without keys may ask its models, but not change it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path

import msgspec

from muxserve.control import messages
from muxserve.control.client import ControlClient, FleetEndedError, NoFleetError, RunningFleet
from muxserve.gateway.body import BodyMemory, read_body
from muxserve.gateway.errors import App, Receive, RequestError, Scope, Send, respond_json

# One change is made at a time; the others wait in the controller, each with a thread here.
MOST_WAITING = 8
MAX_BODY_BYTES = 65536


class ScaleOrder(msgspec.Struct, forbid_unknown_fields=True):
    """Have so many replicas of a model."""

    model: str
    replicas: int

    def command(self) -> messages.Command:
        """For the controller."""
        return messages.Scale({self.model: self.replicas})


class DrainOrder(msgspec.Struct, forbid_unknown_fields=True):
    """Empty a unit and end it."""

    unit: str

    def command(self) -> messages.Command:
        """For the controller."""
        return messages.DrainUnit(self.unit)


class RemoveOrder(msgspec.Struct, forbid_unknown_fields=True):
    """Serve a model no longer."""

    model: str

    def command(self) -> messages.Command:
        """For the controller."""
        return messages.Remove(self.model)


Order = ScaleOrder | DrainOrder | RemoveOrder
ORDERS: dict[str, type[Order]] = {"/admin/scale": ScaleOrder, "/admin/drain": DrainOrder, "/admin/remove": RemoveOrder}


class ChangeRoutes:
    """Answers when the change is complete, or says why there is none. A client that leaves does not stop it.

    Args:
        run_dir: the fleet's directory, where its controller listens.
        has_keys: whether the endpoint wants keys at present.
    """

    def __init__(self, run_dir: str, has_keys: Callable[[], bool]) -> None:
        self._fleet = RunningFleet(Path(run_dir))
        self._has_keys = has_keys
        self._bodies = BodyMemory(MAX_BODY_BYTES)
        self._waiting = 0

    def apps(self) -> dict[str, App]:
        """By path; for admins."""
        return {path: partial(self._change, order) for path, order in ORDERS.items()}

    async def _change(self, kind: type[Order], scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST":
            raise RequestError(
                HTTPStatus.METHOD_NOT_ALLOWED, f"{scope['path']} takes POST only", headers=[(b"allow", b"POST")]
            )
        if not self._has_keys():
            raise RequestError(
                HTTPStatus.FORBIDDEN,
                "this fleet has no keys, so nobody may change it over HTTP; set gateway.api_keys, or use the commands "
                "(muxserve scale, drain, remove) on its machine",
            )
        with self._bodies.claim() as claim:
            body = await read_body(receive, scope["headers"], MAX_BODY_BYTES, claim)
        try:
            order = msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise RequestError(HTTPStatus.BAD_REQUEST, f"{scope['path']}: {error}") from None
        if self._waiting >= MOST_WAITING:
            raise RequestError(
                HTTPStatus.TOO_MANY_REQUESTS, f"{MOST_WAITING} changes wait already; try again when they are made"
            )
        self._waiting += 1
        try:
            # In a thread that goes on when the client leaves.
            steps, answer = await asyncio.shield(asyncio.to_thread(self._do, order.command()))
        finally:
            self._waiting -= 1
        if isinstance(answer, messages.CommandRefused):
            status = HTTPStatus.BAD_REQUEST if answer.mistake else HTTPStatus.CONFLICT
            raise RequestError(status, f"{answer.text}; nothing was changed")
        await respond_json(send, {"result": "done", "text": answer.text, "steps": steps})

    def _do(self, command: messages.Command) -> tuple[list[str], messages.Done | messages.CommandRefused]:
        steps: list[str] = []
        try:
            with ControlClient(self._fleet) as client:
                return steps, client.do(command, steps.append)
        except FleetEndedError as error:
            return steps, messages.CommandRefused(str(error), mistake=False)
        except NoFleetError as error:
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from None

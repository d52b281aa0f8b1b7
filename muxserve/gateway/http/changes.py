"""Changes of the running fleet over HTTP: passed on to the controller, as the commands do over its Unix socket.

    POST   /admin/scale         {"model": NAME, "replicas": N}
    POST   /admin/drain         {"unit": NAME}
    POST   /admin/remove        {"model": NAME}
    POST   /admin/models        a fleet file with one model, YAML or JSON; ?unit=UNIT: it joins that unit
    DELETE /admin/models/NAME
    POST   /admin/apply         a fleet file; ?dry_run=true: only what it takes; ?in_place=true: see `muxserve apply`

Paths in such a file are relative to the fleet's own file, and variables are those of `muxserve deploy`.
Only with a key of an admin: whoever reaches the port of a fleet without keys may ask its models, but not change it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qsl

import msgspec

from muxserve.control import messages
from muxserve.control.client import ControlClient, FleetEndedError, NoFleetError, RunningFleet
from muxserve.gateway.http.body import BodyMemory, read_body
from muxserve.gateway.http.errors import App, Receive, RequestError, Scope, Send, check_method, respond_json

# One change runs at a time; the others wait in the controller, each with a thread here. These are no threads of the
# event loop's: there are few of them, and usage, batches and metrics need them meanwhile.
MOST_WAITING = 8
MAX_BODY_BYTES = 1 << 20


class ScaleOrder(msgspec.Struct, forbid_unknown_fields=True):
    """Set the number of a model's replicas."""

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


# The file name in errors about a text that came over HTTP.
BODY = "body"
MODELS = "/admin/models"
APPLY = "/admin/apply"
_ABOUT: dict[str, dict[str, tuple[str, Sequence[str]]]] = {
    "/admin/scale": {"post": ("Set the number of a model's replicas", ())},
    "/admin/drain": {"post": ("Empty a unit and end it", ())},
    "/admin/remove": {"post": ("Serve a model no longer", ())},
    MODELS: {"post": ("Serve the model of a fleet file, in a running unit if one is named", ("unit",))},
    f"{MODELS}/{{model}}": {"delete": ("Serve a model no longer", ())},
    APPLY: {
        "post": (
            "Become what a fleet file says, or with dry_run=true only say what that takes; with in_place=true end "
            "models that get another version first, where there is no room for both",
            ("dry_run", "in_place"),
        )
    },
}


def described() -> dict[str, object]:
    """The paths as OpenAPI has them."""
    return {path: {method: _operation(path, *about) for method, about in of.items()} for path, of in _ABOUT.items()}


def _operation(path: str, words: str, query: Sequence[str]) -> dict[str, object]:
    where = [(name, "query", False) for name in query] + ([("model", "path", True)] if "{model}" in path else [])
    operation: dict[str, object] = {
        "summary": words,
        "parameters": [
            {"name": name, "in": place, "required": required, "schema": {"type": "string"}}
            for name, place, required in where
        ],
        "responses": {
            "200": {"description": "It has happened"},
            "400": {"description": "The request is wrong; with key and line where it is a file"},
            "403": {"description": "The key is no admin's, or the fleet has no keys"},
            "409": {"description": "It could not be done, or not all of it; the message says which part was"},
        },
    }
    if path in ORDERS:
        kind = ORDERS[path]
        fields = {
            field.name: {"type": "integer" if field.type is int else "string"} for field in msgspec.structs.fields(kind)
        }
        schema: dict[str, object] = {"type": "object", "properties": fields, "required": list(fields)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    elif not where or query:
        content = {kind: {"schema": {"type": "object"}} for kind in ("application/yaml", "application/json")}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


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
        self._threads = ThreadPoolExecutor(MOST_WAITING, "changes")
        self._waiting = 0

    def apps(self) -> dict[str, App]:
        """By path, or by its beginning where that ends with a slash; for admins."""
        orders: dict[str, App] = {path: partial(self._order, kind) for path, kind in ORDERS.items()}
        return {**orders, MODELS: self._add, f"{MODELS}/": self._remove, APPLY: self._apply}

    async def _order(self, kind: type[Order], scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._body(scope, receive)
        try:
            order = msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise RequestError(HTTPStatus.BAD_REQUEST, f"{scope['path']}: {error}") from None
        await self._make(order.command(), send)

    async def _add(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = _query(scope, "unit")
        text = await self._text(scope, receive)
        await self._make(messages.Add(text, BODY, "", asked.get("unit", "")), send)

    async def _remove(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_method(scope, "DELETE")
        self._check_keys()
        await self._make(messages.Remove(scope["path"].removeprefix(f"{MODELS}/")), send)

    async def _apply(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = _query(scope, "dry_run", "in_place")
        for name, value in asked.items():
            if value not in ("true", "false"):
                raise RequestError(HTTPStatus.BAD_REQUEST, f"{name} is true or false, not {value!r}", param=name)
        text = await self._text(scope, receive)
        dry_run, in_place = (asked.get(name) == "true" for name in ("dry_run", "in_place"))
        await self._make(messages.Apply(text, BODY, "", None, dry_run, in_place), send)

    async def _text(self, scope: Scope, receive: Receive) -> str:
        try:
            return (await self._body(scope, receive)).decode()
        except UnicodeDecodeError:
            raise RequestError(HTTPStatus.BAD_REQUEST, "the body is no text in UTF-8") from None

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        check_method(scope, "POST")
        self._check_keys()
        with self._bodies.claim() as claim:
            return await read_body(receive, scope["headers"], MAX_BODY_BYTES, claim)

    def _check_keys(self) -> None:
        if not self._has_keys():
            raise RequestError(
                HTTPStatus.FORBIDDEN,
                "this fleet has no keys, so nobody may change it over HTTP; set gateway.api_keys, or use the commands "
                "(muxserve scale, drain, add, remove, apply) on its machine",
            )

    async def _make(self, command: messages.Command, send: Send) -> None:
        if self._waiting >= MOST_WAITING:
            raise RequestError(
                HTTPStatus.TOO_MANY_REQUESTS, f"{MOST_WAITING} changes wait already; try again when they are done"
            )
        self._waiting += 1
        try:
            # In a thread that goes on when the client leaves.
            doing = asyncio.get_running_loop().run_in_executor(self._threads, self._do, command)
            steps, answer = await asyncio.shield(doing)
        finally:
            self._waiting -= 1
        if isinstance(answer, messages.CommandRefused):
            status = HTTPStatus.BAD_REQUEST if answer.mistake else HTTPStatus.CONFLICT
            raise RequestError(status, f"{answer.text}; {answer.after}")
        result = messages.result_of(command, answer)
        if result == "left":
            raise RequestError(HTTPStatus.CONFLICT, "\n".join([answer.text, *answer.left]))
        await respond_json(send, {"result": result, "text": answer.text, "steps": steps})

    def _do(self, command: messages.Command) -> tuple[list[str], messages.Done | messages.CommandRefused]:
        steps: list[str] = []
        try:
            with ControlClient(self._fleet) as client:
                return steps, client.do(command, steps.append)
        except FleetEndedError as error:
            return steps, messages.CommandRefused(str(error), mistake=False)
        except NoFleetError as error:
            raise RequestError(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from None


def _query(scope: Scope, *names: str) -> dict[str, str]:
    """What the URL says behind its question mark: each of `names` once, and nothing else."""
    pairs = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
    asked = dict(pairs)
    if len(asked) < len(pairs) or set(asked) - set(names):
        raise RequestError(HTTPStatus.BAD_REQUEST, f"{scope['path']} takes {', '.join(names)} behind its ?, once")
    return asked

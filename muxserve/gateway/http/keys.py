"""API keys over HTTP, for admins: made, listed and revoked while the fleet serves.

POST   /admin/keys       {"tenant": NAME, "name": "ci", "expires_in": SECONDS}; the answer alone has the key itself
GET    /admin/keys       all keys, without their text; ?tenant=NAME: those of one tenant
DELETE /admin/keys/ID    the key opens nothing from then on
"""

from __future__ import annotations

import difflib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from urllib.parse import parse_qs

import msgspec

from muxserve.gateway.http.body import BodyMemory, read_order
from muxserve.gateway.http.errors import App, Receive, RequestError, Scope, Send, check_method, respond_json, shortened
from muxserve.gateway.limits.tenants import Tenancy
from muxserve.gateway.usage.issued_keys import IssuedKey, IssuedKeys

log = logging.getLogger(__name__)

KEYS = "/admin/keys"
MAX_BODY_BYTES = 1 << 14
MOST_NAME = 64
# Longer ones are meant to have no end.
MOST_SECONDS = 10 * 365 * 86400


class KeyOrder(msgspec.Struct, forbid_unknown_fields=True):
    """A key that is to be made: for whom, what it is called, and for how many seconds it is good; None: until it is
    revoked."""

    tenant: str
    name: str = ""
    expires_in: float | None = None


class KeyRoutes:
    """Answers what is about keys.

    Args:
        tenancy: has the keys, where there are tenants.
        tenants: the names of the tenants that the fleet has at present.
    """

    def __init__(self, tenancy: Tenancy, tenants: Callable[[], list[str]]) -> None:
        self._tenancy = tenancy
        self._tenants = tenants
        self._bodies = BodyMemory(MAX_BODY_BYTES)

    def apps(self) -> dict[str, App]:
        """By path, or by its beginning where that ends with a slash; for admins."""
        return {KEYS: self._all, f"{KEYS}/": self._one}

    async def _all(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_method(scope, "GET", "POST")
        keys = self._keys()
        if scope["method"] == "POST":
            await self._create(keys, scope, receive, send)
            return
        asked = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        tenant = asked.get("tenant", [None])[-1]
        with _told():
            used = keys.last_days()
            found = [_shown(key, used.get(key.id)) for key in keys.all() if tenant in (None, key.tenant)]
        await respond_json(send, {"object": "list", "data": found})

    async def _create(self, keys: IssuedKeys, scope: Scope, receive: Receive, send: Send) -> None:
        order = await read_order(receive, scope, self._bodies, KeyOrder, MAX_BODY_BYTES)
        self._check(order)
        with _told():
            key, text = keys.create(order.tenant, order.name, order.expires_in)
        log.info("key %s of tenant %s was made", key.id, key.tenant)
        await respond_json(send, {**_shown(key, None), "key": text})

    def _check(self, order: KeyOrder) -> None:
        known = self._tenants()
        if order.tenant not in known:
            close = difflib.get_close_matches(order.tenant, known, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"this fleet has {', '.join(known) or 'none'}"
            message = f"there is no tenant {shortened(order.tenant)}; {hint}"
            raise RequestError(HTTPStatus.BAD_REQUEST, message, param="tenant")
        if len(order.name) > MOST_NAME or not order.name.isprintable():
            message = f"'name' has at most {MOST_NAME} printable characters"
            raise RequestError(HTTPStatus.BAD_REQUEST, message, param="name")
        if order.expires_in is not None and not 0 < order.expires_in <= MOST_SECONDS:
            message = "'expires_in' is a number of seconds, more than 0 and at most ten years; leave it out for no end"
            raise RequestError(HTTPStatus.BAD_REQUEST, message, param="expires_in")

    async def _one(self, scope: Scope, receive: Receive, send: Send) -> None:
        check_method(scope, "DELETE")
        keys = self._keys()
        name = scope["path"].removeprefix(f"{KEYS}/")
        with _told():
            key = keys.revoke(name)
        if key is None:
            message = f"there is no key {shortened(name)}; GET {KEYS} lists them by `id`"
            raise RequestError(HTTPStatus.NOT_FOUND, message)
        log.info("key %s of tenant %s is revoked", key.id, key.tenant)
        await respond_json(send, _shown(key, None))

    def _keys(self) -> IssuedKeys:
        if self._tenancy.keys is None:
            raise RequestError(
                HTTPStatus.BAD_REQUEST,
                "keys belong to tenants, and this fleet has none; declare `tenants` in its fleet file",
            )
        return self._tenancy.keys


def _shown(key: IssuedKey, last_day: str | None) -> dict[str, object]:
    more = {"object": "api_key", "status": key.status(time.time()), "last_used_on": last_day}
    return {**msgspec.structs.asdict(key), **more}


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        log.error("API keys: %s", error)
        raise RequestError(
            HTTPStatus.SERVICE_UNAVAILABLE, f"the usage database cannot be read or written at present: {error}"
        ) from None

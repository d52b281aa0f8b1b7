"""What runs batches in one gateway, put together: the store, the runner, its routes, and the endpoint that it asks."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable

import msgspec

from muxserve.gateway.batches.asking import WholeAnswer, ask
from muxserve.gateway.batches.loads import FleetLoads
from muxserve.gateway.batches.routes import BatchRoutes
from muxserve.gateway.batches.runner import BatchRunner
from muxserve.gateway.batches.store import BatchStore, StoredBatch
from muxserve.gateway.http.app import GatewayApp
from muxserve.gateway.http.errors import RequestError
from muxserve.gateway.http.http_request import BatchCaller
from muxserve.gateway.limits.admission import Caller
from muxserve.gateway.limits.tenants import NOBODY
from muxserve.spec import BatchesSpec


class GatewayBatches:
    """The batches of a fleet, as one of its gateways has them.

    Args:
        spec: where they are kept.
        endpoint: the endpoint of this gateway, as soon as there is one.

    Raises:
        OSError: the directory cannot be written.
    """

    def __init__(self, spec: BatchesSpec, endpoint: Callable[[], GatewayApp], loads: FleetLoads) -> None:
        try:
            self._store = BatchStore(spec)
        except (OSError, sqlite3.Error) as error:
            raise OSError(f"batches cannot be kept in {spec.directory}: {error}") from None
        self._endpoint = endpoint
        self.runner = BatchRunner(self._store, self, loads)
        self.routes = BatchRoutes(self._store, self.runner.look)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Run batches from now on."""
        self._task = asyncio.create_task(self.runner.run())

    def close(self) -> None:
        """Leave them to another gateway."""
        if self._task is not None:
            self._task.cancel()
        with contextlib.suppress(sqlite3.Error):
            self._store.release()
        self._store.close()

    # ------------------------------------------------------------ for the runner

    def model_of(self, batch: StoredBatch, asked: str | None) -> str:
        """See `BatchWork.model_of`."""
        caller = self._caller(batch)
        if caller is None:
            raise ValueError(f"there is no tenant {batch.owner!r} any more")
        try:
            return self._endpoint().model_of(asked, caller, batch.id)
        except RequestError as error:
            raise ValueError(error.message) from None

    def is_revoked(self, batch: StoredBatch) -> bool:
        """See `BatchWork.is_revoked`."""
        keys = self._endpoint().access.tenancy.keys
        return keys is not None and bool(batch.key) and keys.is_revoked(batch.key)

    def draining(self) -> bool:
        """See `BatchWork.draining`."""
        return self._endpoint().draining

    async def ask(self, batch: StoredBatch, body: bytes) -> WholeAnswer:
        """See `BatchWork.ask`."""
        caller = self._caller(batch)
        if caller is None:
            error = {"message": f"there is no tenant {batch.owner!r} any more", "type": "PermissionDeniedError"}
            return WholeAnswer(403, "", msgspec.json.encode({"error": {**error, "param": None, "code": 403}}))
        return await ask(self._endpoint(), BatchCaller(caller), batch.endpoint, body)

    def _caller(self, batch: StoredBatch) -> Caller | None:
        owner = "" if batch.owner == NOBODY else batch.owner
        return self._endpoint().access.keys.of(owner, batch.key)

"""How a gateway follows changes of its fleet that it cannot follow at once."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import msgspec
import pytest

from muxserve.gateway import gateway as module
from muxserve.gateway.gateway import Gateway
from muxserve.spec import FleetSpec, GatewaySpec, save_fleet
from tests.support.patience import PATIENCE


class Follower(Gateway):
    """Takes in fleets, when nothing is in the way."""

    def __init__(self, fleet: FleetSpec) -> None:
        self.fleet = fleet
        self.adopted: list[int] = []
        self.failures = [sqlite3.OperationalError("database is locked"), OSError("too many open files")]
        self._changed = asyncio.Event()

    def _adopt(self, fleet: FleetSpec) -> None:
        self.fleet = fleet
        if self.failures:
            raise self.failures.pop()
        self.adopted.append(fleet.generation)


async def test_a_change_that_cannot_be_followed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_SECONDS", 0.01)
    fleet = FleetSpec(str(tmp_path), GatewaySpec("127.0.0.1", 0, ["first"]), [], [])
    gateway = Follower(fleet)
    following = asyncio.create_task(gateway._follow())
    # Its file is not there for a moment, either.
    gateway.fleet_changed()
    await asyncio.sleep(0.02)
    save_fleet(msgspec.structs.replace(fleet, generation=7))
    async with asyncio.timeout(PATIENCE):
        while not gateway.adopted:
            await asyncio.sleep(0.01)
    assert gateway.adopted == [7]
    assert not gateway.failures
    # What is followed is not adopted again.
    gateway.fleet_changed()
    await asyncio.sleep(0.05)
    assert gateway.adopted == [7]
    following.cancel()

"""Other units' memory managers on this machine: who holds what, and for how long."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from muxserve.memory import MemoryManagerError, MemoryManagerGone
from muxserve.memory.client import MemoryClient
from muxserve.migration import remote_pools as module
from muxserve.migration.pages import HostPages
from muxserve.migration.remote_pools import RemotePools
from muxserve.migration.tasks import JoinPool
from muxserve.spec import UnitSpec
from tests.memory.conftest import Start, connect, manager, small, start  # noqa: F401 (fixtures)
from tests.support.patience import eventually

Connect = Callable[[str], MemoryClient]


@pytest.fixture
def others() -> RemotePools:
    return RemotePools("tester", 1, HostPages)


def shared(client: MemoryClient, key: str, count: int = 2) -> JoinPool:
    """Blocks that the other unit's migrator has set aside and shares."""
    blocks = client.step("a", reserve=count).reserved.tolist()
    client.hand_off("a", key, blocks, 10.0, release=[])
    return JoinPool("move", "a", memory_socket="", generation=client.generation, key=key, blocks=tuple(blocks))


def at(join: JoinPool, unit_spec: UnitSpec, **changes: object) -> JoinPool:
    fields = {name: getattr(join, name) for name in join.__slots__}
    return JoinPool(**{**fields, "memory_socket": unit_spec.memory_socket, **changes})  # type: ignore[arg-type]


def free(client: MemoryClient) -> int:
    return int(client.stats()["pools"][0]["free_pages"])


def test_both_hold_the_blocks(connect: Connect, small: UnitSpec, others: RemotePools) -> None:  # noqa: F811
    migrator, other = connect("migrator"), connect("other")
    before = free(other)
    assert others.join(at(shared(migrator, "k1"), small))
    assert others.join(at(shared(migrator, "k2"), small))
    migrator.close()
    assert free(other) == before - 4 * 6
    with others.writing("move", "a") as pages:
        assert len(pages) == 1
    others.leave("move")
    eventually(lambda: free(other) == before, "all pages are free")
    with pytest.raises(MemoryManagerGone), others.writing("move", "a"):
        pass
    others.leave("move")  # twice does no harm


def test_nobody_reaches_it(others: RemotePools, small: UnitSpec) -> None:  # noqa: F811
    assert not others.join(JoinPool("move", "a", memory_socket=small.memory_socket, generation=1, key="k", blocks=(1,)))


def test_what_is_not_there_any_more(connect: Connect, small: UnitSpec, others: RemotePools) -> None:  # noqa: F811
    migrator = connect("migrator")
    join = at(shared(migrator, "k"), small)
    with pytest.raises(MemoryManagerGone, match="started anew"):
        others.join(at(join, small, generation=join.generation + 1))
    with pytest.raises(MemoryManagerError, match="UNKNOWN_KEY"):
        others.join(at(join, small, key="another"))
    with pytest.raises(MemoryManagerError, match="names other blocks"):
        others.join(at(join, small, blocks=(19,)))
    others.leave("move")
    migrator.close()
    other = connect("other")
    eventually(lambda: free(other) == 100, "all pages are free")


def test_a_manager_that_started_anew(
    manager: subprocess.Popen[bytes],  # noqa: F811
    connect: Connect,  # noqa: F811
    start: Start,  # noqa: F811
    small: UnitSpec,  # noqa: F811
    others: RemotePools,
) -> None:
    assert others.join(at(shared(connect("migrator"), "k"), small))
    manager.kill()
    manager.wait()
    start(small)
    with pytest.raises(MemoryManagerGone), others.writing("move", "a"):
        pass
    join = at(shared(connect("migrator"), "k"), small)
    with pytest.raises(MemoryManagerGone, match="started anew"):
        others.join(join)
    others.leave("move")
    again = at(shared(connect("migrator"), "k2"), small, move="next")
    assert others.join(again)
    with others.writing("next", "a"):
        pass


def test_memory_is_let_go_of(
    manager: subprocess.Popen[bytes],  # noqa: F811
    connect: Connect,  # noqa: F811
    small: UnitSpec,  # noqa: F811
    others: RemotePools,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def pools() -> set[str]:
        with open(f"/proc/{os.getpid()}/maps") as maps:
            return {line for line in maps if "muxserve-" in line and ".pool." in line}

    # Pools of other tests in this process.
    before = pools()

    def mapped() -> bool:
        return bool(pools() - before)

    migrator = connect("migrator")
    assert others.join(at(shared(migrator, "k"), small))
    others.tidy()
    assert mapped()
    others.leave("move")
    others.tidy()
    assert mapped(), "it may be wanted again"
    monkeypatch.setattr(module.time, "monotonic", lambda: time.time() + 1e6)
    others.tidy()
    assert not mapped()
    monkeypatch.undo()
    # A manager that has ended for good is not waited for.
    assert others.join(at(shared(migrator, "k2"), small))
    others.leave("move")
    manager.send_signal(signal.SIGTERM)
    manager.wait()
    others.tidy()
    assert not mapped()

"""A unit in a process of its own, over processes that only pretend: what it says, and what it can be told."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from muxserve import wire
from muxserve.cluster.events import Down, Failed, PartId, Ready, Up
from muxserve.cluster.host_link import (
    AnyCommand,
    ReadState,
    StartMigrator,
    StartModel,
    StopModel,
    Tell,
)
from muxserve.cluster.units import write_unit_spec
from muxserve.spec import UnitSpec
from muxserve.spec.run_dir import RunDir
from tests.cluster.conftest import ROOT, alive, fake_unit_spec, gpu_unit_spec
from tests.cluster.host_client import HostClient
from tests.support.patience import PATIENCE

PROGRAM = """
import sys
from muxserve.cluster import unit_host
from tests.cluster.conftest import fake_commands
unit_host.commands_for = fake_commands
sys.exit(unit_host.main(sys.argv[1:]))
"""


class Host(HostClient):
    """The process, and what it says."""

    def __init__(self, process: asyncio.subprocess.Process, run_dir: Path, unit_spec: UnitSpec) -> None:
        super().__init__(unit_spec)
        self.process, self.run_dir = process, run_dir

    def journal(self) -> list[str]:
        return (self.run_dir / "journal").read_text().splitlines()

    async def end(self) -> int:
        return await asyncio.wait_for(self.process.wait(), PATIENCE)


async def start(run_dir: RunDir, *arguments: str, on_gpus: bool = False) -> Host:
    unit_spec = gpu_unit_spec(run_dir.path) if on_gpus else fake_unit_spec(run_dir.path)
    file = write_unit_spec(unit_spec)
    command = [sys.executable, "-c", PROGRAM, "--unit-spec", str(file), *arguments]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stderr=pipe, cwd=ROOT)
    return Host(process, run_dir.path, unit_spec)


@pytest.fixture
async def run_dir(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return RunDir(tmp_path_factory.mktemp("run"))


@pytest.fixture
async def host(run_dir: RunDir) -> AsyncIterator[Host]:
    host = await start(run_dir, "--ends-with-input", "--migrates", "--serves", "one")
    yield host
    if host.process.returncode is None:
        host.process.kill()
        await host.process.wait()
    host.close()
    run_dir.remove()


async def test_it_serves_what_it_is_told_to(host: Host) -> None:
    ready = await host.until(Ready)
    assert ready.seconds > 0
    (sized,) = host.sized
    assert sized.pools[0].num_pages == 41
    one = {PartId("engine", "one", phase) for phase in ("prefill", "decode")}
    assert host.ups() == {*one, *(PartId(kind) for kind in ("memory", "warm_parent", "unit", "migrator"))}

    assert (await host.state(ReadState()))["models"]["one"] == {"decoding": 0}
    for command in (Tell(wire.GatewayDown(3)), StartModel("two")):
        assert (await host.ask(command)).problem == ""
    assert host.ups() >= {PartId("engine", "two", phase) for phase in ("prefill", "decode")}
    for command in (StopModel("one"), StartMigrator()):  # it has one
        assert (await host.ask(command)).problem == ""
    for line in ("u0 got GatewayDown 3", "u0 got Retire two", "u0 got Revive two", "u0 got Retire one"):
        async with asyncio.timeout(PATIENCE):
            while line not in host.journal():
                await asyncio.sleep(0.02)

    pids = host.pids()
    host.process.send_signal(signal.SIGTERM)
    assert await host.end() == 0
    assert not any(alive(pid) for pid in pids)
    assert "stop memory" in host.journal()


async def test_what_cannot_be_done_is_said(host: Host) -> None:
    await host.until(Ready)
    (host.run_dir / "fail-two-decode").write_text("")
    answer = await host.ask(StartModel("two"))
    assert answer.problem == "the weights are of cheese"
    assert answer.part is not None
    assert answer.part.model == "two"
    commands: list[AnyCommand] = [StartModel("three"), StopModel("three")]
    for command in commands:
        assert (await host.ask(command)).problem == "u0 has no model three"
    assert host.process.returncode is None


async def test_it_ends_with_who_holds_its_input(host: Host) -> None:
    await host.until(Ready)
    pids = host.pids()
    assert host.process.stdin is not None
    host.process.stdin.close()
    assert await host.end() == 0
    assert not any(alive(pid) for pid in pids)


async def test_nothing_outlives_it(host: Host) -> None:
    await host.until(Ready)
    pids = host.pids()
    host.process.kill()
    async with asyncio.timeout(PATIENCE):
        while any(alive(pid) for pid in pids):
            await asyncio.sleep(0.02)


async def test_it_restarts_what_dies(host: Host) -> None:
    await host.until(Ready)
    engine = PartId("engine", "one", "decode")
    pid, heard = (await host.until(Up, engine)).pid, len(host.events)
    os.kill(pid, signal.SIGKILL)
    assert "SIGKILL" in (await host.until(Down, engine)).reason
    assert (await host.until(Up, engine, after=heard)).pid != pid


async def test_a_start_that_fails(run_dir: RunDir) -> None:
    (run_dir.path / "die-unit").write_text("")
    host = await start(run_dir)
    failed = await host.until(Failed)
    assert failed.part == PartId("unit")
    assert failed.message == "unit scheduler cannot start: exited with status 7"
    assert failed.tail == ("unit dies because the test says so",)
    assert await host.end() == 3
    host.close()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--serves", "three"], "three: not in this unit"), ([], "a unit on GPUs needs --gpu-plan")],
)
async def test_wrong_input(run_dir: RunDir, arguments: list[str], words: str) -> None:
    host = await start(run_dir, *arguments, on_gpus=not arguments)
    _, errors = await host.process.communicate()
    assert host.process.returncode == 2
    assert words in errors.decode()
    host.close()

"""A unit in a process of its own, over processes that only pretend: what it says, and what it can be told."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from muxserve import wire
from muxserve.cluster.events import (
    Down,
    Draining,
    Event,
    Expected,
    Failed,
    PartId,
    Progress,
    Ready,
    Starting,
    Up,
    from_line,
    to_line,
)
from muxserve.cluster.unit_host import HostProcess
from muxserve.cluster.units import write_unit_spec
from muxserve.spec.run_dir import RunDir
from tests.cluster.conftest import ROOT, alive, fake_unit_spec, gpu_unit_spec
from tests.support.patience import PATIENCE

PROGRAM = """
import sys
from muxserve.cluster import unit_host
from tests.cluster.conftest import fake_commands
unit_host.commands_for = fake_commands
sys.exit(unit_host.main(sys.argv[1:]))
"""


class Host:
    """The process, and what it says."""

    def __init__(self, process: asyncio.subprocess.Process, run_dir: Path) -> None:
        self.process, self.run_dir = process, run_dir
        self.events: list[Event] = []
        self.sized: list[dict[str, Any]] = []
        self.number = 0

    async def hear(self) -> dict[str, Any] | None:
        """The next line; an answer, if it is one."""
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), PATIENCE)
        assert line, f"it ended: {self.events[-3:]}"
        fields: dict[str, Any] = json.loads(line)
        if "reply" in fields:
            return fields
        if fields["event"] == "Sized":
            self.sized.append(fields["unit_spec"])
        else:
            self.events.append(from_line(line))
        return None

    async def until(self, kind: type, part: PartId | None = None) -> Any:
        """The next event of that kind."""
        heard = len(self.events)
        while True:
            for event in self.events[heard:]:
                if isinstance(event, kind) and (part is None or event.part == part):
                    return event
            heard = len(self.events)
            await self.hear()

    async def tell(self, do: str, **more: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.number += 1
        self.process.stdin.write(f"{json.dumps({'id': self.number, 'do': do, **more})}\n".encode())
        while (answer := await self.hear()) is None:
            pass
        assert answer.pop("reply") == self.number
        return answer

    def pids(self) -> list[int]:
        return [event.pid for event in self.events if isinstance(event, Up)]

    def journal(self) -> list[str]:
        return (self.run_dir / "journal").read_text().splitlines()

    async def end(self) -> int:
        assert self.process.stdout is not None
        for line in (await self.process.stdout.read()).splitlines():
            self.events.append(from_line(line))
        return await asyncio.wait_for(self.process.wait(), PATIENCE)


@pytest.fixture
async def run_dir(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return RunDir(tmp_path_factory.mktemp("run"))


async def start(run_dir: RunDir, *arguments: str, on_gpus: bool = False) -> Host:
    file = write_unit_spec(gpu_unit_spec(run_dir.path) if on_gpus else fake_unit_spec(run_dir.path))
    command = [sys.executable, "-c", PROGRAM, "--unit-spec", str(file), *arguments]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, cwd=ROOT)
    return Host(process, run_dir.path)


@pytest.fixture
async def host(run_dir: RunDir) -> AsyncIterator[Host]:
    host = await start(run_dir, "--commands", "--migrates", "--serves", "one")
    yield host
    if host.process.returncode is None:
        host.process.kill()
        await host.process.wait()
    run_dir.remove()


async def test_it_serves_what_it_is_told_to(host: Host) -> None:
    ready = await host.until(Ready)
    assert ready.seconds > 0
    (sized,) = host.sized
    assert sized["pools"][0]["num_pages"] == 41
    ups = {event.part for event in host.events if isinstance(event, Up)}
    one = {PartId("engine", "one", phase) for phase in ("prefill", "decode")}
    assert ups == {*one, *(PartId(kind) for kind in ("memory", "warm_parent", "unit", "migrator"))}

    assert (await host.tell("state"))["state"]["models"]["one"] == {"decoding": 0}
    message = base64.b64encode(wire.encode(wire.GatewayDown(3))).decode()
    assert await host.tell("tell", message=message) == {}
    assert await host.tell("prefetch", model="two") == {}
    assert await host.tell("start_model", model="two") == {}
    two = {PartId("engine", "two", phase) for phase in ("prefill", "decode")}
    assert {event.part for event in host.events if isinstance(event, Up)} >= two
    assert await host.tell("stop_model", model="one") == {}
    assert await host.tell("start_migrator") == {}  # it has one
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
    answer = await host.tell("start_model", model="two")
    assert answer["error"] == "the weights are of cheese"
    assert answer["part"]["model"] == "two"
    for do, more in (("start_model", {"model": "three"}), ("dance", {}), ("tell", {"message": "?"})):
        assert "not a command" in (await host.tell(do, **more))["error"]
    assert host.process.returncode is None


async def test_it_ends_with_who_commands_it(host: Host) -> None:
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
    pid = next(event.pid for event in host.events if isinstance(event, Up) and event.part == engine)
    os.kill(pid, signal.SIGKILL)
    assert "SIGKILL" in (await host.until(Down, engine)).reason
    assert (await host.until(Up, engine)).pid != pid


async def test_a_start_that_fails(run_dir: RunDir) -> None:
    (run_dir.path / "die-unit").write_text("")
    host = await start(run_dir)
    failed = await host.until(Failed)
    assert failed.part == PartId("unit")
    assert failed.message == "unit scheduler cannot start: exited with status 7"
    assert failed.tail == ("unit dies because the test says so",)
    assert await host.end() == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--serves", "three"], "three: not in this unit"), ([], "a unit on GPUs needs --gpu-plan")],
)
async def test_wrong_input(run_dir: RunDir, arguments: list[str], words: str) -> None:
    host = await start(run_dir, *arguments, on_gpus=not arguments)
    _, errors = await host.process.communicate()
    assert host.process.returncode == 2
    assert words in errors.decode()


@pytest.mark.parametrize(
    "event",
    [
        Expected((PartId("unit"), PartId("gateway", index=1))),
        Starting(PartId("unit", unit="u1")),
        Progress(PartId("engine", "a/b", "decode"), "wörds\n"),
        Up(PartId("memory"), 7, 0.5),
        Down(PartId("memory"), "killed", 0.05),
        Ready(1.5),
        Draining(30.0),
        Failed(PartId("unit"), "no", Path("/x/unit.log"), ("a", "b")),
        Failed(PartId("unit"), "no"),
    ],
)
def test_events_are_lines(event: Event) -> None:
    line = to_line(event)
    assert "\n" not in line
    assert from_line(line) == event


@pytest.mark.parametrize("line", ["", "{}", '{"event": "Dance"}', '{"event": "Up", "part": 3}'])
def test_what_is_no_event(line: str) -> None:
    with pytest.raises(ValueError, match="not an event"):
        from_line(line)


async def test_a_command_that_fails_is_answered(capsys: pytest.CaptureFixture[str]) -> None:
    class Broken:
        async def stop_model(self, model: str) -> None:
            raise RuntimeError(f"{model} does not end")

    process = HostProcess(Broken())  # type: ignore[arg-type]
    await process._answer({"id": 7, "do": "stop_model", "model": "one"})
    assert json.loads(capsys.readouterr().out) == {"reply": 7, "error": "RuntimeError: one does not end"}

"""Another fleet takes over the port of the one that runs, while streams are open."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import yaml

from tests.e2e.fleet import ROOT, START_SECONDS, Fleet, running
from tests.e2e.load import stream_chat, until
from tests.e2e.test_versions import CHECKPOINTS, LONG, Streams, declared
from tests.support import preloaded
from tests.support.patience import PATIENCE


@pytest.mark.thorough
async def test_a_fleet_takes_over_and_every_stream_ends(tmp_path: Path) -> None:
    """Those that are open end where they began, and later ones in the new fleet, which has the other checkpoint."""
    file, next_file = tmp_path / "fleet.yaml", tmp_path / "next.yaml"
    file.write_text(yaml.safe_dump(declared(*CHECKPOINTS)))
    next_file.write_text(yaml.safe_dump(declared(*reversed(CHECKPOINTS))))
    with running(file, start=preloaded.start) as fleet:
        port = fleet.url.rpartition(":")[2]
        line = [sys.executable, "-m", "muxserve.cli.app", "deploy", str(next_file), "--port", port, "--take-over"]
        said = []
        for name in ("chat", "other"):
            asked = {**LONG, "model": name, "stream": False}
            said.append(fleet.client.chat.completions.create(**asked).choices[0].message.content)
        with open(tmp_path / "next.log", "wb") as log:
            async with Streams.open(fleet) as streams:
                await until(lambda: streams.in_service() > 0, "in service")
                new = preloaded.start(
                    line,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                )
                try:
                    await until(lambda: fleet.process.poll() is not None, "ended", START_SECONDS)
                    assert fleet.process.wait() == 0
                    streams.generation = 1
                    await until(lambda: streams.asked(1), "asked anew")
                except BaseException:
                    print((tmp_path / "next.log").read_text()[-4000:], file=sys.stderr)
                    print([[generation for generation, _ in each] for each in streams.answers], file=sys.stderr)
                    os.killpg(new.pid, signal.SIGKILL)
                    raise
        try:
            for answers in streams.answers:
                assert answers[0] == (0, said[0])
                assert {text for generation, text in answers if generation == 0} <= {*said}
                assert {text for generation, text in answers if generation == 1} == {said[1]}
            assert "another fleet has taken over" in (fleet.directory / "deploy.log").read_text()
        finally:
            new.send_signal(signal.SIGINT)
            assert new.wait(2 * PATIENCE) == 0


def upgraded(fleet: Fleet, file: Path, log: Path) -> subprocess.Popen[bytes]:
    """`muxserve upgrade --in-place`."""
    line = [sys.executable, "-m", "muxserve.cli.app", "upgrade", str(file), "--in-place", "--fleet", fleet.url]
    with open(log, "wb") as to:
        return subprocess.Popen(
            line,
            stdout=to,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **fleet.environment, "PYTHONPATH": str(ROOT)},
        )


def two_units(first: Path = CHECKPOINTS[0]) -> dict[str, Any]:
    """`chat` with that checkpoint, and `other` in a unit of its own."""
    file = declared(first, CHECKPOINTS[1])
    file["models"][1]["stages"] = 2
    return file


def broken_copy(checkpoint: Path, to: Path) -> Path:
    """A checkpoint whose weights are of another shape, which nobody sees before an engine loads them."""
    shutil.copytree(checkpoint, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, "intermediate_size": 2 * config["intermediate_size"]}))
    return to


@pytest.mark.thorough
@pytest.mark.parametrize("broken", [False, True], ids=["served", "broken"])
async def test_units_change_one_after_the_other_where_there_is_no_room_for_both_fleets(
    tmp_path: Path, broken: bool
) -> None:
    """No request is lost. If the new fleet cannot start, the old one has all its models again, and meanwhile clients
    are asked to come back."""
    file, next_file, log = tmp_path / "fleet.yaml", tmp_path / "next.yaml", tmp_path / "next.log"
    file.write_text(yaml.safe_dump(two_units()))
    first = broken_copy(CHECKPOINTS[0], tmp_path / "broken") if broken else CHECKPOINTS[0]
    next_file.write_text(yaml.safe_dump(two_units(first)))
    with running(file, start=preloaded.start) as fleet:
        async with fleet.async_client() as client:
            said = [(await stream_chat(client, name, LONG))["text"] for name in ("chat", "other")]
            stop = asyncio.Event()
            answers: list[list[str]] = [[] for _ in range(8)]

            async def keep_asking(number: int) -> None:
                while not stop.is_set():
                    name = ("chat", "other")[number % 2]
                    try:
                        answers[number].append((await stream_chat(client, name, LONG))["text"])
                    except openai.InternalServerError as error:
                        # Between the end of the new fleet and the return of the model to the old one.
                        if not broken or error.status_code != 503:
                            raise
                        await asyncio.sleep(int(error.response.headers["retry-after"]))

            asking = [asyncio.create_task(keep_asking(number)) for number in range(len(answers))]
            upgrade = upgraded(fleet, next_file, log)
            try:
                await until(lambda: upgrade.poll() is not None, "ended", 2 * START_SECONDS)
            finally:
                stop.set()
                failed = [each for each in await asyncio.gather(*asking, return_exceptions=True) if each]
                if failed or upgrade.poll() != (3 if broken else 0):
                    print(log.read_text()[-6000:], file=sys.stderr)
            assert not failed
            assert upgrade.returncode == (3 if broken else 0)
            assert all({*texts} == {said[number % 2]} for number, texts in enumerate(answers))
            assert (fleet.process.poll() is None) is broken
            assert [(await stream_chat(client, name, LONG))["text"] for name in ("chat", "other")] == said
        words = log.read_text()
        if broken:
            assert "serves on" in words
        else:
            pid = int(re.findall(r"process (\d+) serves the fleet", words)[0])
            new = psutil.Process(pid)
            new.send_signal(signal.SIGINT)
            await until(lambda: not new.is_running() or new.status() == psutil.STATUS_ZOMBIE, "stopped", 2 * PATIENCE)

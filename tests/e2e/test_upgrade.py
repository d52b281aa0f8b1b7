"""Another fleet takes over the port of the one that runs, while streams are open."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.e2e.fleet import ROOT, START_SECONDS, running
from tests.e2e.load import until
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

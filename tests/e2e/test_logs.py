"""Logs of a fleet that was started with `--log-format json`, and the command that shows them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

from tests.e2e.fleet import ROOT, Fleet
from tests.e2e.mixed_reference import GENERATING
from tests.support.patience import PATIENCE

FIELDS = {"time", "level", "logger", "pid", "message"}


def test_lines_are_objects_and_name_their_request(mixed: Fleet) -> None:
    body = {"model": GENERATING, "prompt": "a", "max_tokens": 1}
    answer = mixed.client.completions.with_raw_response.create(**body, extra_headers={"x-request-id": "logged-1"})
    assert answer.headers["x-request-id"] == "logged-1"
    deploy = (mixed.directory / "deploy.log").read_text().splitlines()
    assert all(set(json.loads(line)) == FIELDS for line in deploy)
    shown = mixed.command("logs", "unit", "-n", "1000")
    assert shown.returncode == 0, shown.stderr
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    assert lines
    assert all(set(line) >= FIELDS for line in lines)
    assert {line["logger"].partition(".")[0] for line in lines} == {"muxserve"}


def test_the_command_shows_parts_and_follows_them(mixed: Fleet) -> None:
    every = mixed.command("logs", "-n", "1")
    parts = {line.partition(" | ")[0].strip() for line in every.stdout.splitlines()}
    assert {"gateway-0", "u0/unit"} <= parts
    wrong = mixed.command("logs", "nobody")
    assert (wrong.returncode, "there is no log of 'nobody'; there are gateway-0" in wrong.stderr) == (2, True)
    line = [sys.executable, "-m", "muxserve.cli.app", "logs", "gateway-0", "-f"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=mixed.environment) as following:
        (log,) = mixed.runtime.glob("muxserve/*/logs/gateway-0.log")
        assert following.stdout is not None
        try:
            marks = iter(following.stdout.readline, "")
            with log.open("a") as appended:
                appended.write("a mark of the test\n")
            assert any(mark == "gateway-0 | a mark of the test\n" for mark in marks)
        finally:
            following.send_signal(signal.SIGINT)
        assert following.wait(PATIENCE) == 0

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


class Server:
    """A running fake server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def seen(self, model: str) -> list[dict[str, Any]]:
        """What was asked of `model`."""
        with urllib.request.urlopen(f"{self.url}/seen", timeout=PATIENCE) as answer:
            return [body for body in json.load(answer) if body["model"] == model]


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Starts servers: seconds per token, and an API key if it wants one."""
    with ExitStack() as running:

        def start(step: float = 0.001, key: str = "") -> Server:
            command = [sys.executable, "-m", "tests.replay.fake_server", str(step), *([key] if key else [])]
            process = running.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            )
            # Leaving the process's own context closes its stdin, which ends it, and waits.
            assert process.stdout is not None
            return Server(process.stdout.readline().strip())

        yield start

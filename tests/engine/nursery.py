"""One process of the test session that has imported vLLM; families of engines are forked from it, as in a fleet."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from muxserve.spec import FleetSpec, GatewaySpec, save_fleet
from tests.support import preloaded
from tests.support.patience import PATIENCE

START_SECONDS = 3 * PATIENCE
END_SECONDS = PATIENCE


class Nursery:
    """The machine's parent of vLLM, with the controller's ends of its sockets."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="mux-nursery-"))
        fleet = FleetSpec(str(self._directory), GatewaySpec("127.0.0.1", 0), [], [])
        save_fleet(fleet)
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(START_SECONDS)
        lifeline, self._lifeline = os.pipe()
        command = [sys.executable, "-m", "muxserve.forks.machine_parent", "--fleet", str(fleet.file)]
        self._log = self._directory / "log"
        with open(self._log, "wb") as log:
            self._process = preloaded.start(
                [*command, "--control-fd", str(theirs.fileno()), "--lifeline-fd", str(lifeline)],
                pass_fds=[theirs.fileno(), lifeline],
                stdout=log,
                stderr=log,
            )
        theirs.close()
        os.close(lifeline)
        self._until("ready")

    def fork(self, unit: str, unit_spec: Path, log: Path, control: socket.socket) -> psutil.Process:
        """A warm parent of that deployment, with `control` as its end of a socket."""
        order = {"op": "fork", "kind": "warm_parent", "unit": unit, "unit_spec": str(unit_spec), "log": str(log)}
        socket.send_fds(self._control, [json.dumps(order).encode()], [control.fileno()])
        return psutil.Process(self._until("forked")["pid"])

    def _until(self, wanted: str) -> dict[str, Any]:
        while True:
            data = self._control.recv(1 << 16)
            assert data, f"vLLM's parent has ended: {self._log.read_text()[-3000:]}"
            event: dict[str, Any] = json.loads(data)
            assert event["event"] != "failed", event
            if event["event"] == wanted:
                return event

    def close(self) -> None:
        """End it; what it has forked ends with its own sockets."""
        self._control.close()
        os.close(self._lifeline)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._directory)


@functools.cache
def nursery() -> Nursery:
    """That of this session."""
    made = Nursery()
    atexit.register(made.close)
    return made


def end(process: psutil.Process) -> None:
    """SIGTERM, and wait until it is gone."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()
        process.wait(END_SECONDS)

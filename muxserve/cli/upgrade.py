"""`muxserve upgrade`: another controller, perhaps of another version, takes a running fleet's place."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from muxserve.cli.output import console, escape, print_error
from muxserve.control.client import ControlClient, NoFleetError, RunningFleet, find, running_fleets
from muxserve.net.exit_codes import ExitCode

_LOOK_SECONDS = 0.2


def upgrade(file: Path, which: str | None, options: Sequence[str]) -> int:
    """Start `muxserve deploy --take-over` in the background, and wait until the fleet before it has ended; returns the
    exit code.

    Args:
        which: the running fleet, where there are several.
        options: for `deploy`.
    """
    try:
        before = find(which)
    except NoFleetError as error:
        print_error(str(error))
        return ExitCode.WRONG
    port = 0
    if (spec := before.spec()) is not None:
        port = spec.gateway.port
        options = ["--host", spec.gateway.host, "--port", str(spec.gateway.port), *options]
    command = [sys.executable, "-m", "muxserve.cli.app", "deploy", str(file), "--take-over", *options]
    # It outlives this command, and the Ctrl-C of its terminal.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while before.alive or not _has_follower(before, port):
            if (code := process.poll()) is not None:
                if before.alive:
                    console.print(f"{escape(before.name)} serves on")
                return code or ExitCode.NOT_DONE
            time.sleep(_LOOK_SECONDS)
    except KeyboardInterrupt:
        process.terminate()
        return ExitCode.INTERRUPTED
    console.print(f"{escape(before.name)} has ended; process {process.pid} serves the fleet")
    return ExitCode.DONE


def _has_follower(before: RunningFleet, port: int) -> bool:
    """Whether another fleet serves at that port."""
    for fleet in running_fleets():
        spec = fleet.spec()
        if fleet != before and spec is not None and spec.gateway.port == port:
            with contextlib.suppress(NoFleetError), ControlClient(fleet) as client:
                client.who()
                return True
    return False

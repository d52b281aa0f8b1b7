"""`muxserve upgrade`: another controller, perhaps of another version, takes a running fleet's place."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from muxserve.cli.output import console, escape, print_error
from muxserve.control.client import NoFleetError, find
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
    if (spec := before.spec()) is not None:
        options = ["--host", spec.gateway.host, "--port", str(spec.gateway.port), *options]
    command = [sys.executable, "-m", "muxserve.cli.app", "deploy", str(file), "--take-over", *options]
    # It outlives this command, and the Ctrl-C of its terminal.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while before.alive:
            if (code := process.poll()) is not None:
                console.print(f"{escape(before.name)} serves on")
                return code or ExitCode.NOT_DONE
            time.sleep(_LOOK_SECONDS)
    except KeyboardInterrupt:
        process.terminate()
        return ExitCode.INTERRUPTED
    console.print(f"{escape(before.name)} has ended; process {process.pid} serves the fleet")
    return ExitCode.DONE

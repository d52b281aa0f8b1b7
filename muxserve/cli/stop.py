"""`muxserve stop`: end a fleet of this machine as Ctrl-C does where it was deployed."""

from __future__ import annotations

import contextlib
import os
import signal
import time

from muxserve.cli.output import console, escape, print_error
from muxserve.control.client import NoFleetError, RunningFleet, find
from muxserve.net.exit_codes import ExitCode

_LOOK_SECONDS = 0.1


def stop(wanted: str | None, now: bool) -> int:
    """End a fleet with its last request, or `now`, and wait until it has ended; returns the exit code."""
    try:
        fleet = find(wanted)
        _signal(fleet, signal.SIGTERM)
        if now:
            # Signals of one number that wait are one; a second of another number ends the fleet at once.
            _signal(fleet, signal.SIGINT)
    except NoFleetError as error:
        print_error(str(error))
        return ExitCode.WRONG
    spec = fleet.spec()
    drains = "" if now or spec is None else f"; running requests have {spec.gateway.drain_seconds:g} s to finish"
    try:
        with console.status(f"{escape(fleet.name)} ends{drains}"):
            if not console.is_terminal:
                console.print(f"{escape(fleet.name)} ends{drains}")
            while fleet.alive:
                time.sleep(_LOOK_SECONDS)
    except KeyboardInterrupt:
        console.print("not waited for; the fleet goes on ending, and `muxserve stop --now` ends it at once")
        return ExitCode.INTERRUPTED
    console.print(f"{escape(fleet.name)} has ended")
    return ExitCode.DONE


def _signal(fleet: RunningFleet, number: signal.Signals) -> None:
    pid = fleet.pid
    if pid is None:
        raise NoFleetError(f"{fleet.name} does not say which process it is; stop it where it was deployed (Ctrl-C)")
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(pid, number)

"""Which descriptors the processes of a fleet hold: none of whoever started it, and none of each other's."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from tests.e2e.fleet import FOREIGN, Fleet


def test_no_process_holds_what_it_was_not_given(quickstart: Fleet) -> None:
    quickstart.wait_healthy()
    held = {process.pid: (line[0], open_files(process)) for process, line in quickstart.commands() if line}
    assert len(held) > 8
    assert not [name for name, files in held.values() if any(FOREIGN in file for file in files.values())]
    for pid, (name, files) in held.items():
        beats = [Path(file).name for file in files.values() if file.endswith(".beat")]
        # The controller watches all of them; everybody else has its own.
        if pid != quickstart.process.pid:
            assert len(beats) <= 1, f"{name} has the heartbeats of others: {beats}"


def open_files(process: psutil.Process) -> dict[int, str]:
    directory = f"/proc/{process.pid}/fd"
    found = {}
    with contextlib.suppress(OSError):  # it has ended
        for each in os.listdir(directory):
            with contextlib.suppress(OSError):
                found[int(each)] = os.readlink(f"{directory}/{each}")
    return found

"""`muxserve logs`: what the processes of a fleet on this machine have written."""

from __future__ import annotations

import sys
import time

from muxserve.cli.output import print_error
from muxserve.control.client import NoFleetError, find
from muxserve.net.logs import Follower, log_files, matching, tail

_LOOK_SECONDS = 0.25


def logs(part: str, lines: int, follow: bool, fleet: str | None) -> int:
    """Print the last `lines` lines of each log of `part` (all if empty), and with `follow` those that come; returns the
    exit code."""
    try:
        running = find(fleet)
    except NoFleetError as error:
        print_error(str(error))
        return 2
    files = log_files(running.path)
    chosen = matching(files, part) if part else files
    if not chosen:
        print_error(f"there is no log of {part!r}; there are {', '.join(files) or 'none'}")
        return 2
    named = follow or len(chosen) > 1
    width = max(map(len, chosen))

    def show(of: str, line: str) -> None:
        sys.stdout.write(f"{of:{width}} | {line}\n" if named else f"{line}\n")

    try:
        ends = {}
        for name, path in chosen.items():
            try:
                last, ends[name] = tail(path, lines)
            except OSError:  # its part has left
                continue
            for line in last:
                show(name, line)
        sys.stdout.flush()
        following = Follower(running.path, part, ends)
        while follow and running.alive:
            for name, line in following.new():
                show(name, line)
            sys.stdout.flush()
            time.sleep(_LOOK_SECONDS)
    except KeyboardInterrupt:  # what a person has seen enough of ends well
        pass
    return 0

"""`muxserve logs`: what the processes of a fleet on this machine have written."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from muxserve.cli.output import print_error
from muxserve.control.client import NoFleetError, find
from muxserve.net.exit_codes import ExitCode
from muxserve.net.logs import Follower, log_files

_LOOK_SECONDS = 0.25


def logs(part: str, lines: int, follow: bool, fleet: str | None) -> int:
    """Print the last `lines` lines of each log of `part` (all if empty), and with `follow` those that come; returns the
    exit code."""
    try:
        running = find(fleet)
    except NoFleetError as error:
        print_error(str(error))
        return ExitCode.WRONG
    following = Follower(running.path, part)
    chosen = following.parts()
    if not chosen:
        print_error(f"there is no log of {part!r}; there are {', '.join(log_files(running.path)) or 'none'}")
        return ExitCode.WRONG
    named = follow or len(chosen) > 1
    width = max(map(len, chosen))

    def show(found: Iterable[tuple[str, str]]) -> None:
        for of, line in found:
            sys.stdout.write(f"{of:{width}} | {line}\n" if named else f"{line}\n")
        sys.stdout.flush()

    try:
        show(following.last(lines))
        while follow and running.alive:
            show(following.new())
            time.sleep(_LOOK_SECONDS)
    except KeyboardInterrupt:  # what a person has seen enough of ends well
        pass
    finally:
        following.close()
    return ExitCode.DONE

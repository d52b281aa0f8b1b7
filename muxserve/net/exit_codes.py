"""What muxserve's commands end with."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Whether a command did what it was asked for. `muxserve.cli.exit_codes` says what that means for each."""

    DONE = 0
    # It was tried, or asked, and the answer is no.
    NO = 1
    # The command line or a file is wrong, or there is nobody to ask. Nothing was begun.
    WRONG = 2
    # Something could not start, or something is left to do.
    NOT_DONE = 3
    # A defect of muxserve: EX_SOFTWARE of sysexits.h.
    BUG = 70
    # As a shell has it for SIGINT.
    INTERRUPTED = 130
    # As a shell has it for SIGPIPE.
    NO_READER = 141

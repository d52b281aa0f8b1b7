"""A process that is to end with its parent notices one that ended before it could say so."""

import os
import subprocess
import sys

from muxserve.process import PARENT_VARIABLE

ASK = "import sys; from muxserve.process import die_with_parent; sys.exit(0 if die_with_parent() else 7)"


def asked(parent: int | None) -> int:
    environment = {k: v for k, v in os.environ.items() if k != PARENT_VARIABLE}
    if parent is not None:
        environment[PARENT_VARIABLE] = str(parent)
    return subprocess.run([sys.executable, "-c", ASK], env=environment).returncode


def test_a_living_parent_is_known() -> None:
    assert asked(os.getpid()) == 0
    assert asked(None) == 0


def test_a_parent_that_has_ended_before_is_noticed() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert asked(gone.pid) == 7

"""Runs a command as the only client of an MPS server of its own: `python -m tests.gpu.trial.under_mps PERCENT COMMAND`.

`PERCENT` is the client's part of the SMs; `none` gives it all of them, without a percentage.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from muxserve.gpu import mps, nvml
from muxserve.gpu.environment import LOG, PIPE, VISIBLE
from muxserve.gpu.sm import PERCENTAGE


@contextlib.contextmanager
def mps_server() -> Iterator[dict[str, str]]:
    """The environment of a client of an MPS server that runs for the length of the block, on the freest GPU.

    Raises:
        SystemExit: MPS does not work here; the message says why.
    """
    control = mps.binary()
    if control is None:
        sys.exit(f"{mps.CONTROL} is not installed")
    (gpu,) = nvml.choose(nvml.visible(nvml.machine(), os.environ), 1)
    with tempfile.TemporaryDirectory(prefix="mps-") as name:
        server = mps.MpsServer(Path(name), [gpu.uuid], control)
        try:
            server.start()
            yield {VISIBLE: gpu.uuid, PIPE: str(server.pipe), LOG: str(server.logs)}
        except mps.MpsError as error:
            sys.exit(str(error))
        finally:
            server.stop()


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    percent, *command = sys.argv[1:]
    inherited = {name: value for name, value in os.environ.items() if name != PERCENTAGE}
    share = {} if percent == "none" else {PERCENTAGE: percent}
    with mps_server() as client:
        return subprocess.run(command, env={**inherited, **client, **share}).returncode


if __name__ == "__main__":
    sys.exit(main())

"""The migrator process: `python -m muxserve.migration.process --deployment PATH`.

One beside each unit scheduler. It moves pages of requests to other units and takes them in; who moves, and when, is the
unit scheduler's to say.
"""

from __future__ import annotations

import argparse
import os
import sys

import msgspec
import zmq

from muxserve import deployment as deployments
from muxserve.deployment import Deployment
from muxserve.migration.migrator import Migrator
from muxserve.migration.pages import HostPages, MakePages
from muxserve.net.process import Signals, die_with_parent, log_to_stderr
from muxserve.net.sockets import NetworkError

# For tests: what this process takes its machine to be.
MACHINE = "MUXSERVE_MACHINE"


def pages_for(deployment: Deployment) -> MakePages:
    """How the pages of the deployment's pools are read and written. On GPUs this imports torch."""
    if deployment.gpu is None:
        return HostPages
    from muxserve.migration.device_pages import DevicePages

    return DevicePages


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 stopped, 2 bad input, 3 could not start."""
    parser = argparse.ArgumentParser(prog="python -m muxserve.migration.process", description="The migrator of a unit.")
    parser.add_argument("--deployment", required=True, help="deployment.json, written by the controller")
    parser.add_argument("--die-with-parent", action="store_true", help="stop when the process that started this ends")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    options = parser.parse_args(arguments)
    if options.die_with_parent and not die_with_parent():
        return 0
    log_to_stderr(options.log_level)
    signals = Signals()
    try:
        deployment = deployments.load(options.deployment)
    except (OSError, msgspec.DecodeError) as error:
        print(f"{options.deployment}: not a deployment: {error}", file=sys.stderr)
        return 2
    try:
        migrator = Migrator(deployment, pages_for(deployment), os.environ.get(MACHINE, ""))
    except NetworkError as error:
        print(f"{options.deployment}: {error}", file=sys.stderr)
        return 3
    except zmq.ZMQError as error:
        print(f"cannot listen on {deployment.migrator_address}: {error}", file=sys.stderr)
        return 3
    try:
        migrator.run(signals)
    finally:
        migrator.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

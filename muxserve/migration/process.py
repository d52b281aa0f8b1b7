"""The migrator process: `python -m muxserve.migration.process --unit-spec PATH`.

One beside each unit scheduler. It moves pages of requests to other units and takes them in; who moves, and when, is the
unit scheduler's to say.
"""

from __future__ import annotations

import argparse
import os
import sys

import msgspec
import zmq

from muxserve import spec
from muxserve.migration.migrator import Migrator
from muxserve.migration.pages import HostPages, MakePages
from muxserve.net.process import Signals, die_with_parent, log_to_stderr
from muxserve.net.sockets import NetworkError
from muxserve.spec import UnitSpec

# For tests: what this process takes its machine to be.
MACHINE = "MUXSERVE_MACHINE"


def pages_for(unit_spec: UnitSpec) -> MakePages:
    """How the pages of the unit's pools are read and written. On GPUs this imports torch."""
    if unit_spec.gpu is None:
        return HostPages
    from muxserve.migration.device_pages import DevicePages

    return DevicePages


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 0 stopped, 2 bad input, 3 could not start."""
    parser = argparse.ArgumentParser(prog="python -m muxserve.migration.process", description="The migrator of a unit.")
    parser.add_argument("--unit-spec", required=True, help="unit.json, written by the controller")
    parser.add_argument("--die-with-parent", action="store_true", help="stop when the process that started this ends")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    options = parser.parse_args(arguments)
    if options.die_with_parent and not die_with_parent():
        return 0
    log_to_stderr(options.log_level)
    signals = Signals()
    try:
        unit_spec = spec.load(options.unit_spec)
    except (OSError, msgspec.DecodeError) as error:
        print(f"{options.unit_spec}: not a unit's spec: {error}", file=sys.stderr)
        return 2
    try:
        migrator = Migrator(unit_spec, pages_for(unit_spec), os.environ.get(MACHINE, ""))
    except NetworkError as error:
        print(f"{options.unit_spec}: {error}", file=sys.stderr)
        return 3
    except zmq.ZMQError as error:
        print(f"cannot listen on {unit_spec.migrator_address}: {error}", file=sys.stderr)
        return 3
    try:
        migrator.run(signals)
    finally:
        migrator.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())

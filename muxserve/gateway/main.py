"""The gateway process: the OpenAI endpoint of a fleet.

python -m muxserve.gateway.main --fleet FILE [--index N]

Importing this module is cheap; `preload` imports vLLM.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable

import msgspec

from muxserve.net.logs import log_to_stderr
from muxserve.net.sockets import NetworkError
from muxserve.spec import FleetSpec, load_fleet

BAD_INPUT = 2


def preload() -> None:
    """Import everything that a gateway needs, so that a fork starts with it.

    Raises:
        RuntimeError: the installed vLLM is not the one that the gateway was written for.
    """
    from muxserve.gateway import process

    process.check()


def run(fleet: FleetSpec, index: int, lifeline_fd: int | None, on_up: Callable[[], None]) -> None:
    """Serve until SIGTERM and drained; read `fleet.file` again at SIGHUP.

    Args:
        fleet: what to serve, and where the units are.
        index: which of the fleet's gateways this is, from 0.
        lifeline_fd: at the end of this file the process ends at once; the controller holds the other end.
        on_up: called when the endpoint accepts connections.

    Raises:
        OSError: the endpoint's address cannot be listened on.
        NetworkError: engines of other machines could not reach this one.
        ValueError: vLLM refuses a model or one of its options.
        RuntimeError: the installed vLLM is not the one that the gateway was written for.
    """
    from muxserve.gateway import process

    process.check()
    process.serve(fleet, index, lifeline_fd, on_up)


def main(arguments: list[str] | None = None) -> int:
    """Run a gateway alone; the units may come later."""
    from muxserve.vllm.args import environment

    parser = argparse.ArgumentParser(description="The OpenAI endpoint of a fleet.")
    parser.add_argument("--fleet", required=True, help="the fleet's fleet.json")
    parser.add_argument("--index", type=int, default=0, help="which of the fleet's gateways, from 0")
    parser.add_argument("--lifeline-fd", type=int, help="end when this file descriptor reaches its end")
    args = parser.parse_args(arguments)
    log_to_stderr()
    try:
        fleet = load_fleet(args.fleet)
    except (OSError, msgspec.MsgspecError) as error:
        print(f"cannot read {args.fleet}: {error}", file=sys.stderr)
        return BAD_INPUT
    if not 0 <= args.index < fleet.gateway.count:
        print(f"--index {args.index}: the fleet has {fleet.gateway.count} gateways, from 0", file=sys.stderr)
        return BAD_INPUT
    os.environ.update(environment())
    address = f"{fleet.gateway.scheme}://{fleet.gateway.host}:{fleet.gateway.port}"
    try:
        run(fleet, args.index, args.lifeline_fd, lambda: logging.getLogger(__name__).info("listening on %s", address))
    except (OSError, ValueError, NetworkError) as error:
        print(f"the gateway cannot start: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Worker threads of tokenizers may still be waiting for work that will not come.
    os._exit(status)

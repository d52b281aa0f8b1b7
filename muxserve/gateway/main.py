"""The gateway process: the OpenAI endpoint of a unit.

python -m muxserve.gateway.main --deployment FILE

Importing this module is cheap; `preload` imports vLLM.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable

import msgspec

from muxserve.deployment import Deployment, load

BAD_INPUT = 2


def preload() -> None:
    """Import everything that a gateway needs, so that a fork starts with it.

    Raises:
        RuntimeError: the installed vLLM is not the one that the gateway was written for.
    """
    from muxserve.gateway import process

    process.check()


def run(deployment: Deployment, lifeline_fd: int | None, on_up: Callable[[], None]) -> None:
    """Serve until SIGTERM and drained.

    Args:
        deployment: what to serve, and where the unit is.
        lifeline_fd: at the end of this file the process ends at once; the controller holds the other end.
        on_up: called when the endpoint accepts connections.

    Raises:
        OSError: the endpoint's address cannot be listened on.
        ValueError: vLLM refuses a model or one of its options.
        RuntimeError: the installed vLLM is not the one that the gateway was written for.
    """
    from muxserve.gateway import process

    process.check()
    process.serve(deployment, lifeline_fd, on_up)


def main(arguments: list[str] | None = None) -> int:
    """Run a gateway alone; the unit may come later."""
    from muxserve.engine.warm_parent import environment

    parser = argparse.ArgumentParser(description="The OpenAI endpoint of a unit.")
    parser.add_argument("--deployment", required=True, help="the unit's deployment.json")
    parser.add_argument("--lifeline-fd", type=int, help="end when this file descriptor reaches its end")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        deployment = load(args.deployment)
    except (OSError, msgspec.MsgspecError) as error:
        print(f"cannot read {args.deployment}: {error}", file=sys.stderr)
        return BAD_INPUT
    os.environ.update(environment())
    address = f"http://{deployment.gateway.host}:{deployment.gateway.port}"
    try:
        run(deployment, args.lifeline_fd, lambda: logging.getLogger(__name__).info("listening on %s", address))
    except (OSError, ValueError) as error:
        print(f"the gateway cannot start: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Worker threads of tokenizers may still be waiting for work that will not come.
    os._exit(status)

"""What all who speak to actors need: answers with a time limit, errors in words, and an end."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from muxserve.cluster.events import PartId

HOST = PartId("host")


async def answer(reference: Any, seconds: float) -> Any:
    """What a call of an actor returns.

    Raises:
        TimeoutError: it has not within `seconds`.
        ray.exceptions.RayError: it cannot.
    """
    return await asyncio.wait_for(reference, seconds)


async def release(ray: Any, actor: Any, group: Any) -> None:
    """End an actor, if there is one, and give its place back."""
    from ray.util.placement_group import remove_placement_group

    with contextlib.suppress(ray.exceptions.RayError):
        if actor is not None:
            ray.kill(actor, no_restart=True)
    with contextlib.suppress(ray.exceptions.RayError):
        await asyncio.to_thread(remove_placement_group, group)


def why(error: BaseException) -> str:
    """What Ray says, for people."""
    if "No module named 'muxserve" in str(error):
        return "a node of the Ray cluster has no MuxServe; install the same version on every node"
    return first_line(error)


def first_line(error: BaseException) -> str:
    """The first words of an error, which may be a page long."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

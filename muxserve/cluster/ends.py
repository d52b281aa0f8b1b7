"""How parts of a fleet are ended in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from muxserve.cluster.supervision import Part

STOP_SECONDS = 5.0
_DRAIN_MARGIN = 5.0  # on top of what the gateways themselves allow their requests


async def stop_parts(parts: Sequence[Part], grace: float = STOP_SECONDS) -> None:
    """SIGTERM for all that run, and SIGKILL after `grace` seconds; returns when they have ended."""
    processes = [part.process for part in parts]
    await asyncio.gather(*(p.stop(grace) for p in processes if p is not None and p.running))


async def drain(gateways: Sequence[Part], seconds: float, forced: asyncio.Event) -> None:
    """Have gateways that nobody starts again end when their requests have, within about so many seconds, or until
    `forced`."""
    hurry: asyncio.Task[object] = asyncio.create_task(forced.wait())
    ended: asyncio.Task[object] = asyncio.create_task(stop_parts(gateways, seconds + _DRAIN_MARGIN))
    await asyncio.wait([hurry, ended], return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    ended.cancel()

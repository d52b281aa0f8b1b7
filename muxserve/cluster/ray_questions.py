"""What the controller asks of the host of a unit on a node, through the unit's actor: one line there, one back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec

from muxserve.cluster.events import PartId
from muxserve.cluster.ray_calls import why
from muxserve.cluster.supervision import GaveUp

# A host that says nothing for so long will not answer any more; most of what it is asked is done in seconds.
ASK_SECONDS = 60.0


class Questions:
    """Those that have not been answered yet. Answers come with all else that the host says."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0

    async def ask(self, what: str, seconds: float = ASK_SECONDS, **more: str) -> dict[str, Any]:
        """Have the host do something within `seconds`; returns its reply, with an `error` if it came to nothing."""
        self._number += 1
        number = self._number
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await self._actor.say.remote(json.dumps({"id": number, "do": what, **more}))
                reply: dict[str, Any] = await future
                return reply
        except TimeoutError:
            return {"error": f"its host has not answered within {seconds:g} s"}
        except self._ray.exceptions.RayError as error:
            return {"error": why(error)}
        finally:
            self._asked.pop(number, None)

    def answered(self, reply: dict[str, Any]) -> None:
        """The host has said so."""
        future = self._asked.pop(reply["reply"], None)
        if future is not None and not future.done():
            future.set_result(reply)

    def give_up(self, why: str) -> None:
        """Nobody will answer what has been asked so far."""
        asked, self._asked = self._asked, {}
        for future in asked.values():
            if not future.done():
                future.set_result({"error": why})


def check(reply: dict[str, Any], model: str) -> None:
    """Whether the host has done what was asked of it for a model.

    Raises:
        GaveUp: it has not.
    """
    if error := reply.get("error"):
        part = reply.get("part")
        raise GaveUp(PartId("engine", model) if part is None else msgspec.convert(part, PartId), str(error))

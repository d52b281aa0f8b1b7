"""What all who speak to actors need: answers with a time limit, errors in words, and an end."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import msgspec

from muxserve.cluster.events import PartId
from muxserve.cluster.supervision import GaveUp

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


# A host that says nothing for so long will not answer any more; most of what it is asked is done in seconds.
ASK_SECONDS = 60.0


class ActorQuestions:
    """Those that have not been answered yet. Answers come with all else that the host says."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._number = 0

    async def ask(self, what: str, seconds: float = ASK_SECONDS, **more: Any) -> dict[str, Any]:
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

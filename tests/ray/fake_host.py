"""Speaks as a unit's host does, and has no processes: python -m tests.ray.fake_host --unit-spec FILE ..."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from muxserve.cluster.events import Failed, PartId, Ready, Up
from muxserve.cluster.host_link import AnyCommand, HostEnd, ReadState, Sized, StartModel
from muxserve.cluster.supervision import GaveUp
from muxserve.spec import load

FATAL = PartId("engine", "fatal", "decode")


async def serve() -> int:
    unit_spec = load(Path(sys.argv[sys.argv.index("--unit-spec") + 1]))
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    link = HostEnd(unit_spec)

    def end(code: int = 0) -> None:
        if not ended.done():
            ended.set_result(code)

    async def do(command: AnyCommand) -> dict[str, Any] | None:
        match command:
            case ReadState():
                nice = os.getpriority(os.PRIO_PROCESS, 0)
                return {"unit": unit_spec.unit, "arguments": sys.argv[1:], "nice": nice, "pid": os.getpid()}
            case StartModel("broken"):
                raise GaveUp(PartId("engine", "broken", "decode"), "no room")
            case StartModel("fatal"):
                link.say(Failed(FATAL, f"{FATAL} keeps dying: killed", "/x/engine.log", ("a", "b")))
                end(4)
                await asyncio.Event().wait()
        return None

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, end)
    loop.add_reader(sys.stdin, lambda: None if os.read(0, 1) else end())
    link.obey(do)
    link.say(Sized(unit_spec))
    link.say(Up(PartId("unit"), 1, 0.1))
    link.say(Ready(0.1))
    print("started", sys.argv[1:], file=sys.stderr, flush=True)
    code = await ended
    loop.remove_reader(sys.stdin)
    if code:
        await link.until_heard(10.0)
    await link.close()
    return code


if __name__ == "__main__":
    sys.exit(asyncio.run(serve()))

"""Questions to unit schedulers: however many ask at the same time, each is asked once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Answer = dict[str, object] | None


class Questions:
    """Those that wait for an answer, by unit."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[asyncio.Future[Answer]]] = {}

    async def ask(self, unit: str, send: Callable[[], None], timeout: float) -> Answer:
        """The answer of `unit`; None if there is none within `timeout` seconds.

        Args:
            send: asks; not called while somebody else waits for the answer.
        """
        waiter: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(unit, [])
        waiting.append(waiter)
        if len(waiting) == 1:
            send()
        try:
            return await asyncio.wait_for(waiter, timeout)
        except TimeoutError:
            return None
        finally:
            if waiter in waiting:
                waiting.remove(waiter)

    def answer(self, unit: str, answer: Answer) -> None:
        """`unit` has answered, or cannot any more (None)."""
        for waiter in self._waiting.pop(unit, []):
            if not waiter.done():
                waiter.set_result(answer)

"""How far a replay is: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from muxserve.replay.run import Counts, Replay

_REFRESH, _LINES = 0.25, 10.0


@contextlib.asynccontextmanager
async def progress(console: Console, running: Replay, seconds: float, requests: int) -> AsyncIterator[None]:
    """Show `running` while the block lasts. `seconds` and `requests` are what the workload has."""
    show = _bar if console.is_terminal else _lines
    task = asyncio.create_task(show(console, running, seconds, requests))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def words(counts: Counts, requests: int) -> str:
    """The state in a line."""
    failed = f", {counts.failed} failed" if counts.failed else ""
    rate = counts.output_tokens / max(counts.elapsed, 1e-9)
    return (
        f"sent {counts.sent} of {requests}, {counts.in_flight} in flight, {counts.completed} done{failed}, "
        f"{rate:.0f} tokens/s"
    )


async def _bar(console: Console, running: Replay, seconds: float, requests: int) -> None:
    columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as bar:
        task = bar.add_task("", total=seconds or None)
        while True:
            counts = running.counts
            bar.update(task, completed=min(counts.elapsed, seconds), description=words(counts, requests))
            await asyncio.sleep(_REFRESH)


async def _lines(console: Console, running: Replay, seconds: float, requests: int) -> None:
    while True:
        await asyncio.sleep(_LINES)
        console.print(f"{running.counts.elapsed:7.1f} s of {seconds:.0f}: {words(running.counts, requests)}")

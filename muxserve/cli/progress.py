"""Renders the controller's events: a live table on a terminal, one line per event elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as Bars
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from muxserve.cli.output import console, escape
from muxserve.cluster.events import (
    Down,
    Draining,
    Event,
    Expected,
    Failed,
    PartId,
    Progress,
    Ready,
    Recovered,
    Starting,
    Stopping,
    Suspected,
    Up,
)
from muxserve.cluster.restarts import DEGRADED_STARTS
from muxserve.planning.demand.downloads import OnBytes, in_lines


@contextlib.contextmanager
def downloads() -> Iterator[OnBytes]:
    """Shows downloads: bars on a terminal, lines elsewhere."""
    if console.is_terminal:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Bars(*columns, TimeRemainingColumn(), console=console) as bars:
            tasks: dict[str, TaskID] = {}

            def draw(repo: str, done: int, size: int) -> None:
                if repo not in tasks:
                    tasks[repo] = bars.add_task(escape(repo), total=size)
                bars.update(tasks[repo], completed=done)

            yield draw
        return
    yield in_lines(lambda text: console.print(escape(text)))


class Renderer(Protocol):
    """Shows events. `close` is called at the end, whatever happened."""

    def __call__(self, event: Event) -> None: ...

    def close(self) -> None: ...


def renderer(console: Console) -> Renderer:
    """The one that fits where `console` writes to."""
    lines = Lines(console)
    return LiveTable(console, lines) if console.is_terminal else lines


class Lines:
    """One line per event, with the time of day and the seconds since the start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()

    def __call__(self, event: Event) -> None:
        text = describe(event)
        if text:
            clock = time.strftime("%H:%M:%S")
            self._console.print(f"{clock} {time.monotonic() - self._began:7.1f} s  {escape(text)}")
        if isinstance(event, Failed) and event.tail:
            self._console.print(f"last lines of {escape(str(event.log))}:")
            for line in event.tail:
                self._console.print(f"  {escape(line)}")

    def close(self) -> None:
        pass


class LiveTable:
    """A table that lives until the fleet is ready or fails; lines before and after it for what is out of the order."""

    def __init__(self, console: Console, lines: Lines) -> None:
        self._lines = lines
        self._rows: dict[PartId, tuple[str, str]] = {}
        self._began: dict[PartId, float] = {}
        self._spinner = Spinner("dots")
        self._live: Live | None = Live(get_renderable=self._table, console=console, refresh_per_second=10)
        self._live.start()

    def __call__(self, event: Event) -> None:
        if self._live is None:
            self._lines(event)
            return
        if getattr(event, "part", None) not in self._rows and isinstance(event, Starting | Progress | Up | Down):
            return
        match event:
            case Expected(parts):
                # Rows are drawn by another thread, and must not become more meanwhile.
                self._rows = {part: self._rows.get(part, ("waiting", "")) for part in parts}
            case Starting(part):
                self._rows[part] = ("starting", "")
                self._began[part] = time.monotonic()
            case Progress(part, detail):
                self._rows[part] = ("starting", detail)
            case Up(part, pid, seconds):
                self._rows[part] = ("up", f"pid {pid}, {seconds:.1f} s")
            case Down(part, reason):
                self._rows[part] = ("died", reason)
                self._lines(event)
            case Suspected() | Recovered():
                self._lines(event)
            case Ready() | Draining() | Stopping() | Failed():
                self.close()
                self._lines(event)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for _ in range(3):
            table.add_column(overflow="fold")
        for part, (state, detail) in self._rows.items():
            sign = {"up": Text("✓", "green"), "died": Text("✗", "red"), "waiting": Text("·", "dim")}.get(state)
            if state == "starting":
                seconds = time.monotonic() - self._began.get(part, time.monotonic())
                detail = f"{detail or 'starting'} {seconds:.0f} s"
            table.add_row(
                sign or self._spinner, Text(str(part), "dim" if state == "waiting" else ""), Text(detail, "dim")
            )
        return table


def describe(event: Event) -> str:
    """An event in words; empty for those that are not worth a line."""
    match event:
        case Starting(part):
            return f"{part}: starting"
        case Progress(part, detail):
            return f"{part}: {detail}"
        case Up(part, pid, seconds):
            return f"{part}: up (pid {pid}, {seconds:.1f} s)"
        case Suspected(part, seconds):
            return f"{part}: no sign of life for {seconds:.1f} s; it gets no new work"
        case Recovered(part):
            return f"{part}: was silent, and is not suspected any more"
        case Down(part, reason, restart_in, failed_starts):
            again = f"{part}: {reason}; starting it again" + (f" in {restart_in:g} s" if restart_in >= 0.5 else "")
            if failed_starts < DEGRADED_STARTS:
                return again
            degraded = f"; {part.model} is degraded until then" if part.model else ""
            return f"{again} (its last {failed_starts} starts failed{degraded})"
        case Ready(seconds):
            return f"ready after {seconds:.1f} s"
        case Draining(seconds, cause):
            because = f"{cause}: " if cause else ""
            return f"{because}no new requests; running ones have {seconds:g} s to finish (Ctrl-C again: end now)"
        case Stopping(cause):
            return f"stopping ({cause})" if cause else "stopping"
        case Failed(_, message):
            return f"failed: {message}"
    return ""

"""`muxserve top`: the live page in a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.segment import Segment, Segments
from rich.text import Text

from muxserve.cli.http import HTTPFailure, stream_events
from muxserve.cli.output import console, escape, print_error
from muxserve.cli.which import endpoint_of
from muxserve.metrics.colours import COLOURS, GREY
from muxserve.metrics.figure_table import FigureTable
from muxserve.metrics.live import JOBS_WINDOW_SECONDS, LiveFrame, LiveJob, LiveModel, LivePool, LiveUnit, Spread
from muxserve.net.exit_codes import ExitCode

_TONES = {
    "up": "green",
    "ok": "green",
    "asleep": "dim",
    **dict.fromkeys(("degraded", "starting", "restarting", "waking", "leaving"), "yellow"),
}
_LEVELS = " ▁▂▃▄▅▆▇█"
_PHASES = ("prefill", "decode", "both")
# Tokens per second are averages over this many frames.
_RATE_FRAMES = 5
_LABEL, _FIGURES = 26, 24
_RETRY_SECONDS = 2.0
# Frames come once a second; one that is this late means that the gateway hangs.
_SILENCE_SECONDS = 10.0

_frames = msgspec.json.Decoder(LiveFrame)


def top(wanted: str | None, key: str | None, once: bool, as_json: bool = False) -> int:
    """Show the fleet `wanted`, or the one that runs here, until Ctrl-C; returns the exit code."""
    found = endpoint_of(wanted)
    if found is None:
        return ExitCode.WRONG
    screen = TopScreen(found)
    try:
        if as_json:
            for frame in _follow(found, key):
                print(msgspec.json.encode(frame).decode(), flush=True)
                if once:
                    return ExitCode.DONE
            raise HTTPFailure(f"{found} has ended the connection")
        if once or not console.is_terminal:
            # Tokens per second are not known before the second frame.
            for _, frame in zip(range(2), _follow(found, key), strict=False):
                screen.take(frame)
            if not screen.begun:
                raise HTTPFailure(f"{found} ended the connection before it showed anything")
            console.print(screen.draw())
            return ExitCode.DONE
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                try:
                    for frame in _follow(found, key):
                        screen.take(frame)
                        live.update(screen.fitted(console), refresh=True)
                    screen.trouble = "the connection has ended; trying again"
                except HTTPFailure as error:
                    if error.status or not screen.begun:
                        raise
                    screen.trouble = f"{error}; trying again"
                live.update(screen.fitted(console), refresh=True)
                time.sleep(_RETRY_SECONDS)
    except HTTPFailure as error:
        print_error(str(error))
        return ExitCode.WRONG
    except KeyboardInterrupt:
        return ExitCode.DONE


def _follow(url: str, key: str | None) -> Iterator[LiveFrame]:
    """The frames of one connection, until it ends.

    Raises:
        HTTPFailure: there is no connection, no such stream, or another key is needed.
    """
    try:
        yield from map(_frames.decode, stream_events(url, "/ui/events", key, _SILENCE_SECONDS))
    except msgspec.DecodeError as error:
        raise HTTPFailure(f"{url} shows something unknown ({error}); is it of another version?") from None
    except HTTPFailure as error:
        text = str(error)
        if error.status == 404:
            text = f"{url} shows nothing: `gateway.ui` is off there; `muxserve status` says how it stands"
        elif error.status in (401, 403):
            text += "; give an admin's key with --api-key, or set MUXSERVE_API_KEY"
        raise HTTPFailure(text, error.status) from None


class TopScreen:
    """What the frames add up to, and how it is drawn. `trouble` is said at the top until the next frame comes."""

    def __init__(self, url: str) -> None:
        self.trouble = ""
        self._url = url
        self._frame: LiveFrame | None = None
        self._jobs: dict[tuple[str, str], LiveJob] = {}
        self._moved: dict[str, list[float]] = {}
        # (time, tokens) by model, of the last frames.
        self._tokens: dict[str, list[tuple[float, int]]] = {}

    @property
    def begun(self) -> bool:
        """Whether a frame has come."""
        return self._frame is not None

    def take(self, frame: LiveFrame) -> None:
        """A frame came."""
        self._frame, self.trouble = frame, ""
        for job in frame.jobs:
            self._jobs[job.unit, job.key] = job
        oldest = frame.time - JOBS_WINDOW_SECONDS
        served = {model.name for model in frame.models}
        self._jobs = {key: job for key, job in self._jobs.items() if job.end >= oldest and job.model in served}
        for move in frame.moves:
            self._moved.setdefault(move.unit, []).append(move.at)
        self._moved = {unit: [at for at in moves if at >= oldest] for unit, moves in self._moved.items()}
        for model in frame.models:
            counted = self._tokens.setdefault(model.name, [])
            if counted and model.tokens < counted[-1][1]:
                counted.clear()  # a unit scheduler was started anew
            counted.append((frame.time, model.tokens))
            del counted[: -_RATE_FRAMES - 1]

    def fitted(self, console: Console) -> RenderableType:
        """The screen, as many lines of it as the terminal has."""
        lines = console.render_lines(self.draw(), console.options, pad=False)
        height = console.size.height
        if len(lines) > height:
            rest = f"… {len(lines) - height + 1} more lines; a taller terminal shows them"
            lines = [*lines[: height - 1], [Segment(rest)]]
        return Segments(segment for line in lines for segment in (*line, Segment.line()))

    def draw(self) -> RenderableType:
        """Everything, at the width of the console that it is printed on."""
        frame = self._frame
        if frame is None:
            return Text(self.trouble or f"asking {self._url}")
        parts: list[RenderableType] = [self._headline(frame)]
        if self.trouble:
            parts.append(Text(self.trouble, style="yellow"))
        parts += [Text(), self._models(frame)]
        for unit in frame.units:
            parts += [Text(), self._unit_line(unit)]
            for pool in unit.pools:
                parts += self._pool(pool)
            parts.append(_Timeline(frame, unit, [job for job in self._jobs.values() if job.unit == unit.name]))
        return Group(*parts)

    # ------------------------------------------------------------ its parts

    def _headline(self, frame: LiveFrame) -> Text:
        models = frame.models
        figures = (
            f"{sum(model.status == 'up' for model in models)} of {len(models)} models up",
            f"{sum(unit.status == 'up' for unit in frame.units)} of {len(frame.units)} units up",
            f"{sum(model.running for model in models)} in service",
            f"{sum(model.waiting + model.queued for model in models)} waiting",
            f"{sum(self._rate(model.name) for model in models):,.0f} tokens/s",
        )
        head = Text(f"{self._url}  ")
        head.append(frame.status, _TONES.get(frame.status, "red"))
        return head.append("  " + ", ".join(figures))

    def _models(self, frame: LiveFrame) -> FigureTable:
        columns = ("model", "state", "replicas", "in service", "waiting", "tokens/s")
        judged = ("TTFT p50", "p95", "SLO", "TPOT p50", "p95", "SLO", "SLO met")
        table = FigureTable([*columns, *judged], words=2)
        for index, model in enumerate(frame.models):
            colour = COLOURS[index % len(COLOURS)]
            tone = _TONES.get(model.status, "red")
            counts = (len(model.replicas), model.running, model.waiting + model.queued)
            said = [f"[{colour}]■[/] {escape(model.name)}", f"[{tone}]{escape(model.status)}[/]", *map(str, counts)]
            latencies = (*_latency(model.ttft, model.slo_ttft), *_latency(model.tpot, model.slo_tpot))
            table.add_row(*said, f"{self._rate(model.name):,.0f}", *latencies, _met(model))
        return table

    def _rate(self, model: str) -> float:
        counted = self._tokens.get(model, ())
        if len(counted) < 2:
            return 0.0
        (began, before), (ended, after) = counted[0], counted[-1]
        return (after - before) / (ended - began) if ended > began else 0.0

    def _unit_line(self, unit: LiveUnit) -> Text:
        line = Text.assemble((unit.name, "bold"), "  ", (unit.status, _TONES.get(unit.status, "red")))
        about = [unit.policy, f"{unit.share_used:.0%} of its compute leased"]
        about += ["on another machine"] if unit.remote else []
        moved = len(self._moved.get(unit.name, ()))
        about += [f"requests that moved away in {JOBS_WINDOW_SECONDS:.0f} s: {moved}"] if moved else []
        line.append("  " + ", ".join(word for word in about if word))
        if unit.draining:
            line.append(f"  draining: {', '.join(unit.draining)}", "yellow")
        return line

    def _pool(self, pool: LivePool) -> list[RenderableType]:
        used = pool.pages - pool.free
        lines: list[RenderableType] = [Text(f"pool {pool.name}: {used:,} of {pool.pages:,} pages in use or cached")]
        assert self._frame is not None
        models = [model.name for model in self._frame.models]
        for part in pool.models:
            figures = f"{part.used:,} / {part.quota:,}"
            lines.append(
                _Bar(
                    part.model,
                    _colour(models, part.model),
                    part.used / max(1, pool.pages),
                    part.cached / max(1, pool.pages),
                    part.quota / max(1, pool.pages),
                    figures,
                )
            )
        return lines


class _Bar:
    """Pages in use, cached pages and the quota of a model as a line: `████▒▒▒  │   20 / 546`."""

    def __init__(self, model: str, colour: str, used: float, cached: float, quota: float, figures: str) -> None:
        self.model, self.colour, self.figures = model, colour, figures
        self.used, self.cached, self.quota = used, cached, quota

    def __rich_console__(self, console: Console, options: object) -> Iterator[RenderableType]:
        width = max(10, console.width - _LABEL - _FIGURES)
        full = round(width * self.used)
        # Whatever is there is seen.
        full = max(full, int(self.used > 0))
        pale = max(round(width * (self.used + self.cached)) - full, int(self.cached > 0))
        mark = min(width - 1, round(width * self.quota))
        line = Text(_label(self.model, ""))
        for cell in range(width):
            if cell == mark:
                line.append("│", "bold")
            else:
                line.append(
                    "█" if cell < full else "▒" if cell < full + pale else "·",
                    self.colour if cell < full + pale else "dim",
                )
        yield line.append(f"{self.figures:>{_FIGURES}}", "dim")


class _Timeline:
    """The jobs of a unit: a line for each model and phase, higher where more of the unit was computed on."""

    def __init__(self, frame: LiveFrame, unit: LiveUnit, jobs: Sequence[LiveJob]) -> None:
        self.frame, self.unit, self.jobs = frame, unit, jobs

    def __rich_console__(self, console: Console, options: object) -> Iterator[RenderableType]:
        models = [model.name for model in self.frame.models]
        width = max(10, console.width - _LABEL)
        began = self.frame.time - JOBS_WINDOW_SECONDS
        for model in dict.fromkeys([*self.unit.serves, *(job.model for job in self.jobs)]):
            for phase in _PHASES:
                jobs = [job for job in self.jobs if (job.model, job.phase) == (model, phase)]
                if jobs:
                    line = Text(_label(model, phase))
                    yield line.append("".join(_columns(jobs, began, width)), _colour(models, model))
        if self.jobs:
            axis = f"{JOBS_WINDOW_SECONDS:.0f} s ago"
            yield Text(" " * _LABEL + axis + "now".rjust(width - len(axis)), "dim")


def _columns(jobs: Iterable[LiveJob], began: float, width: int) -> Iterator[str]:
    """How much of a unit was computed on in each of `width` equal parts of the time since `began`."""
    seconds = JOBS_WINDOW_SECONDS / width
    used = [0.0] * width
    for job in jobs:
        first = max(0, int((job.start - began) / seconds))
        last = min(width - 1, int((job.end - began) / seconds))
        for column in range(first, last + 1):
            start = began + column * seconds
            used[column] += job.share * max(0.0, min(job.end, start + seconds) - max(job.start, start)) / seconds
    for share in used:
        # A short job is seen as well.
        yield _LEVELS[max(int(share > 0), min(len(_LEVELS) - 1, round(share * (len(_LEVELS) - 1))))]


def _label(model: str, phase: str) -> str:
    room = _LABEL - 3 - (len(phase) + 1 if phase else 0)
    name = model if len(model) <= room else model[: room - 1] + "…"
    return f"  {name:<{room}} " + (f"{phase} " if phase else "")


def _colour(models: Sequence[str], model: str) -> str:
    return COLOURS[models.index(model) % len(COLOURS)] if model in models else GREY


def _latency(spread: Spread | None, limit: float | None) -> tuple[str, str, str]:
    """Median, 95th percentile and objective."""
    slo = "-" if limit is None else _time(limit)
    if spread is None:
        return "-", "-", slo
    tail = _time(spread.p95)
    if limit is not None:
        tone = "red" if spread.p95 > limit else "green"
        tail = f"[{tone}]{tail}[/]"
    return _time(spread.p50), tail, slo


def _met(model: LiveModel) -> str:
    if model.met is None:
        return "-"
    tone = "red" if model.met < 0.9 else "yellow" if model.met < 0.99 else "green"
    return f"[{tone}]{model.met:.1%}[/] of {model.requests}"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.{1 if seconds < 0.01 else 0}f} ms"

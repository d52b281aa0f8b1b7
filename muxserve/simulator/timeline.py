"""Every job as an event of the Chrome trace format, which Perfetto (ui.perfetto.dev) opens.

One process per device, one thread per engine. Times in the file are microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec


class TimelineJob(NamedTuple):
    """One job: `phase` is "prefill", "decode" or, of both together, "mixed". Times are seconds."""

    model: str
    phase: str
    began: float
    ended: float
    sequences: int
    tokens: int


class JobTimeline:
    """Jobs of one unit."""

    __slots__ = ("device", "devices", "jobs", "unit")

    def __init__(self, unit: str, device: str, devices: tuple[int, ...]) -> None:
        self.unit = unit
        self.device = device
        self.devices = devices
        self.jobs: list[TimelineJob] = []

    def job(self, model: str, phase: str, began: float, ended: float, sequences: int, tokens: int) -> None:
        """A job has run."""
        self.jobs.append(TimelineJob(model, phase, began, ended, sequences, tokens))


def trace_events(timelines: Iterable[JobTimeline]) -> Iterator[dict[str, object]]:
    """The events of a Chrome trace."""
    for timeline in timelines:
        # Prefill above decode, models in order of appearance.
        lanes: dict[tuple[str, str], int] = {}
        for job in timeline.jobs:
            lanes.setdefault((job.model, job.phase), len(lanes))
        for device in timeline.devices:
            name = f"{timeline.unit}: {timeline.device} {device}"
            yield {"ph": "M", "name": "process_name", "pid": device, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": device, "args": {"sort_index": device}}
            for (model, phase), lane in lanes.items():
                yield {
                    "ph": "M",
                    "name": "thread_name",
                    "pid": device,
                    "tid": lane,
                    "args": {"name": f"{model} {phase}"},
                }
            for job in timeline.jobs:
                yield {
                    "ph": "X",
                    "name": f"{job.phase} {job.model}",
                    "cat": job.phase,
                    "pid": device,
                    "tid": lanes[job.model, job.phase],
                    "ts": round(job.began * 1e6, 3),
                    "dur": round((job.ended - job.began) * 1e6, 3),
                    "args": {"sequences": job.sequences, "tokens": job.tokens},
                }


def write_timeline(path: Path, timelines: Iterable[JobTimeline]) -> int:
    """Write a trace file, event by event; returns how many events it has.

    Raises:
        OSError: the file cannot be written.
    """
    encoder = msgspec.json.Encoder()
    count = 0
    with open(path, "wb") as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[')
        for event in trace_events(timelines):
            file.write((b",\n" if count else b"\n") + encoder.encode(event))
            count += 1
        file.write(b"\n]}\n")
    return count

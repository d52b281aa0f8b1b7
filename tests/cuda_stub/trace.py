"""What a process has done with contexts and graphs, as the stand-in of the driver has noted it (`streams.cpp`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

# The first SM of a context, and how many it has.
Place = tuple[int, int]
WHOLE: Place = (0, 132)


@dataclass
class Trace:
    """Calls of one process. `made`: green contexts; `chosen`: contexts that became current; `captured`: place by graph;
    `replayed` and `dropped`: graphs; `refused`: calls that would have broken a capture; `astray`: graphs and kernels of
    another context than the current one; `asked`: how often it looked which context is current."""

    made: list[Place] = field(default_factory=list)
    chosen: list[Place] = field(default_factory=list)
    captured: dict[int, Place] = field(default_factory=dict)
    replayed: list[int] = field(default_factory=list)
    replayed_after_last_capture: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    astray: list[str] = field(default_factory=list)
    asked: int = 0

    @classmethod
    def of(cls, path: Path, pid: int) -> Trace:
        """The record of the process with this number, so far."""
        trace, current = cls(), WHOLE
        for line in path.read_text().splitlines():
            number, event, *rest = line.split()
            if int(number) != pid:
                continue
            match event, rest:
                case "green", (first, count):
                    trace.made.append((int(first), int(count)))
                case "context", (first, count):
                    current = int(first), int(count)
                    trace.chosen.append(current)
                case "captured", (graph, first, count, _):
                    trace.captured[int(graph)] = int(first), int(count)
                    trace.replayed_after_last_capture.clear()
                case "replayed", (graph,):
                    trace.replayed.append(int(graph))
                    trace.replayed_after_last_capture.append(int(graph))
                    if trace.captured[int(graph)] != current:
                        trace.astray.append(f"{line}, captured in {trace.captured[int(graph)]}, replayed in {current}")
                case "computed", (first, count, _):
                    if (int(first), int(count)) != current:
                        trace.astray.append(f"{line}, in {current}")
                case "astray", ():
                    trace.astray.append(line)
                case "dropped", (graph,):
                    trace.dropped.append(int(graph))
                case "refused", (name,):
                    trace.refused.append(name)
                case "asked", ():
                    trace.asked += 1
        return trace

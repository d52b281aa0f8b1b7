"""How events look, on a terminal and elsewhere."""

from __future__ import annotations

import io

from rich.console import Console

from muxserve.cli.progress import Lines, LiveTable, renderer
from muxserve.cluster.events import (
    Down,
    Draining,
    Event,
    Expected,
    Failed,
    PartId,
    Progress,
    Ready,
    Starting,
    Stopping,
    Up,
)

UNIT, ENGINE = PartId("unit"), PartId("engine", "one", "decode")
STORY: list[Event] = [
    Expected((UNIT, ENGINE)),
    Starting(UNIT),
    Up(UNIT, 17, 0.25),
    Starting(ENGINE),
    Progress(ENGINE, "loading [weights]"),
    Down(ENGINE, "killed by SIGKILL", 0.5),
    Up(ENGINE, 18, 1.5),
    Ready(3.0),
    Draining(30, "SIGTERM"),
    Stopping(),
]


def test_lines() -> None:
    out = io.StringIO()
    show = renderer(Console(file=out, width=200, highlight=False))
    assert isinstance(show, Lines)
    for event in STORY:
        show(event)
    lines = [line.split(" s  ", 1)[1] for line in out.getvalue().splitlines()]
    assert lines == [
        "unit scheduler: starting",
        "unit scheduler: up (pid 17, 0.2 s)",
        "engine one/decode: starting",
        "engine one/decode: loading [weights]",
        "engine one/decode: killed by SIGKILL; starting it again in 0.5 s",
        "engine one/decode: up (pid 18, 1.5 s)",
        "ready after 3.0 s",
        "SIGTERM: no new requests; running ones have 30 s to finish (Ctrl-C again: end now)",
        "stopping",
    ]


def test_a_failure_comes_with_the_end_of_the_log() -> None:
    out = io.StringIO()
    show = Lines(Console(file=out, width=200, highlight=False))
    show(Failed(UNIT, "unit scheduler cannot start", "/x/unit.log", ("[bold]last", "words")))
    assert out.getvalue().endswith("last lines of /x/unit.log:\n  [bold]last\n  words\n")


def test_live_table() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, highlight=False)
    show = renderer(console)
    assert isinstance(show, LiveTable)
    for event in STORY:
        show(event)
        show(Progress(PartId("engine", "unknown", "decode"), "is not a part of this"))
    show.close()
    text = out.getvalue()
    assert "✓" in text
    assert "unit scheduler" in text
    assert "pid 18, 1.5 s" in text
    assert "ready after 3.0 s" in text
    assert "unknown" not in text.split("ready after")[0]

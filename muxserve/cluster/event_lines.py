"""Events as lines of JSON: what a unit's host writes on its output where it is a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from muxserve.cluster.events import (
    Down,
    Draining,
    Event,
    Expected,
    Failed,
    Progress,
    Ready,
    Recovered,
    Starting,
    Stopping,
    Suspected,
    Up,
)

_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (Expected, Starting, Progress, Up, Down, Suspected, Recovered, Ready, Draining, Stopping, Failed)
}


def to_line(event: Event) -> str:
    """`event` as one line of JSON, without the end of the line."""
    fields: dict[str, Any] = msgspec.to_builtins(event, enc_hook=str)
    return msgspec.json.encode({"event": type(event).__name__, **fields}).decode()


def from_line(line: str | bytes) -> Event:
    """The event of a line.

    Raises:
        ValueError: the line is none.
    """
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
        kind = _KINDS[fields.pop("event")]
        return msgspec.convert(fields, type=kind, dec_hook=_path)
    except (msgspec.MsgspecError, KeyError) as error:
        raise ValueError(f"not an event: {line!r} ({error})") from None


def _path(kind: type, value: object) -> Path:
    if kind is not Path:
        raise NotImplementedError(kind)
    return Path(str(value))

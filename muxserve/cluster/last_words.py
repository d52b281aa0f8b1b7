"""What a part wrote to its log since it was started last: the reason of its end may be in it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from muxserve.cluster.events import Event, PartId, Starting

TAIL_LINES = 15
Said = tuple[Path | None, tuple[str, ...]]


class LastWords:
    """Reads the logs in `log_dir`."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        # How long a part's logs were when it was started last: what stands before is of its predecessors.
        self._began: dict[tuple[PartId, str], int] = {}

    def note(self, event: Event) -> None:
        """To be told all events, as they happen."""
        if isinstance(event, Starting):
            for name in event.part.log_names:
                with contextlib.suppress(OSError):
                    self._began[event.part, name] = (self._log_dir / name).stat().st_size

    def of(self, part: PartId) -> Said:
        """The log that says something, and its last lines."""
        for name in part.log_names:
            path = self._log_dir / name
            with contextlib.suppress(OSError):
                with path.open("rb") as log_file:
                    log_file.seek(self._began.get((part, name), 0))
                    lines = log_file.read().decode(errors="replace").splitlines()
                if lines:
                    return path, tuple(lines[-TAIL_LINES:])
        return None, ()

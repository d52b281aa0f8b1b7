"""What a part wrote to its log since it was started last: the reason of its end may be in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

from muxserve.cluster.events import Event, PartId, Starting
from muxserve.cluster.processes import EXITED
from muxserve.gpu import faults, nvml
from muxserve.spec import GpuSpec

TAIL_LINES = 15
# Longest line that becomes part of a reason.
_MOST_CHARACTERS = 500
Said = tuple[Path | None, tuple[str, ...]]


class LogTail:
    """Reads the logs in `log_dir`."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        # Which file each of a part's logs was when it was started last, and how long: what stands before is of its
        # predecessors.
        self._began: dict[tuple[PartId, str], tuple[int, int]] = {}

    def note(self, event: Event) -> None:
        """Takes all events, as they happen."""
        if isinstance(event, Starting):
            for name in event.part.log_names:
                with contextlib.suppress(OSError):
                    stat = (self._log_dir / name).stat()
                    self._began[event.part, name] = stat.st_ino, stat.st_size

    def of(self, part: PartId) -> Said:
        """The log that says something, and its last lines."""
        for name in part.log_names:
            path = self._log_dir / name
            with contextlib.suppress(OSError):
                with path.open("rb") as log_file:
                    inode, began = self._began.get((part, name), (0, 0))
                    stat = os.fstat(log_file.fileno())
                    # A log that was put aside or renamed meanwhile begins anew.
                    log_file.seek(began if inode == stat.st_ino and began <= stat.st_size else 0)
                    lines = log_file.read().decode(errors="replace").splitlines()
                if lines:
                    return path, tuple(lines[-TAIL_LINES:])
        return None, ()


_NVML_SECONDS = 5.0  # a lost GPU may keep the driver busy
_ON_GPUS = ("weights", "engine", "memory", "mps")


# The last line of a traceback.
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*")


async def explain(gpu: GpuSpec | None, part: PartId, reason: str, tail: Sequence[str]) -> str:
    """What is known of a part's end beyond `reason`, from the last lines of its log and, if it uses GPUs, from the
    driver; empty if nothing is."""
    if gpu is not None and part.kind in _ON_GPUS and (found := await _of_gpus(gpu, tail)):
        return found
    if not reason.startswith(EXITED):
        return ""  # it has said itself what was wrong, or somebody else ended it
    errors = [line for line in tail if _ERROR.fullmatch(line)]
    return errors[-1][:_MOST_CHARACTERS] if errors else ""


async def _of_gpus(gpu: GpuSpec, tail: Sequence[str]) -> str:
    """What the driver says of the unit's GPUs, or else what the lines mean."""
    try:
        async with asyncio.timeout(_NVML_SECONDS):
            found = await asyncio.to_thread(nvml.machine)
    except TimeoutError:
        return "the GPU driver does not answer"
    for uuid in gpu.uuids:
        state = found.by_uuid(uuid)
        if found.gpus and (state is None or state.fault):
            number = uuid if state is None else str(state.index)
            return f"GPU {number}: {state.fault if state else 'it is no longer there'}"
    return faults.explain(tail)

"""The owner's eye on processes of this machine: reads their heartbeats, and asks the kernel what the silent ones do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from muxserve.cluster.events import PartId
from muxserve.cluster.processes import children
from muxserve.cluster.watchdog import Finding, Sign, Watchdog
from muxserve.net.heartbeat import PERIOD_SECONDS, HeartbeatReader, heartbeat_file
from muxserve.spec import WatchdogRules

_TICKS = os.sysconf("SC_CLK_TCK")
# A silent process that has had less of a core than this since it was looked at last does not compute.
_COMPUTES = 0.1


@dataclass
class _WatchedProcess:
    pid: int
    reader: HeartbeatReader
    on_finding: Callable[[Finding[PartId]], None]
    cpu_seconds: float = 0.0
    measured_at: float = 0.0


class Watch:
    """Watches those that this process can kill. `keep` or another loop has to call `look` every `period` seconds; a
    pause of that loop counts for nobody.

    Args:
        rules: None: nobody is watched.
        run_dir: where the processes beat.
    """

    def __init__(self, rules: WatchdogRules | None, run_dir: str) -> None:
        self._run_dir = run_dir
        self._watched: dict[PartId, _WatchedProcess] = {}
        self._dog: Watchdog[PartId] | None = None
        self.period = PERIOD_SECONDS
        if rules is not None:
            self._dog = Watchdog(rules, self.period)

    def begin(
        self,
        part: PartId,
        pid: int,
        on_finding: Callable[[Finding[PartId]], None],
        begun: bool = True,
        waits_for: Collection[PartId] = (),
    ) -> None:
        """Watch the process `pid`, which is `part`; `on_finding` is told what is thought of it when that changes. Not
        `begun`: it beats only some time later, when it has loaded what it needs. `waits_for`: parts that it may have to
        wait for, so that it is not to blame for its silence."""
        if self._dog is None:
            return
        self.end(part)
        self._watched[part] = _WatchedProcess(
            pid, HeartbeatReader(heartbeat_file(self._run_dir, part.file_name)), on_finding
        )
        self._dog.watch(part, waits_for, begun)

    def end(self, part: PartId) -> None:
        """It has ended, or is about to."""
        watched = self._watched.pop(part, None)
        if watched is not None and self._dog is not None:
            watched.reader.close()
            self._dog.forget(part)

    @contextlib.contextmanager
    def over(
        self,
        part: PartId,
        pid: int,
        on_finding: Callable[[Finding[PartId]], None],
        begun: bool = True,
        waits_for: Collection[PartId] = (),
    ) -> Iterator[None]:
        """Watch it meanwhile, see `begin`."""
        self.begin(part, pid, on_finding, begun, waits_for)
        try:
            yield
        finally:
            self.end(part)

    async def keep(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await asyncio.sleep(self.period)
            self.look()

    def look(self) -> None:
        """See how all are, and tell those who want to know."""
        if self._dog is None:
            return
        now = time.monotonic()
        signs = {part: sign for part, each in self._watched.items() if (sign := self._sign(part, each, now))}
        for finding in self._dog.look(now, signs):
            watched = self._watched.get(finding.name)
            if watched is not None:
                watched.on_finding(finding)

    def _sign(self, part: PartId, each: _WatchedProcess, now: float) -> Sign | None:
        assert self._dog is not None
        beats = each.reader.beats()
        if beats is None:
            return None
        if self._dog.silence(part) == 0.0:
            each.measured_at = 0.0
            return Sign(beats)
        # Ranks of an engine compute in processes of their own, below it.
        doing = _activity(each.pid, part.kind == "engine")
        passed, before = now - each.measured_at, each.cpu_seconds
        known, each.cpu_seconds, each.measured_at = each.measured_at > 0, doing.seconds, now
        computes = doing.runs or (known and doing.seconds - before >= _COMPUTES * passed)
        # The others of an engine ask one that is stopped again and again, which looks like a long step and is none.
        return Sign(beats, computes and not doing.stopped)


@dataclass
class _Activity:
    runs: bool = False  # or waits for a core
    stopped: bool = False
    seconds: float = 0.0


def _activity(pid: int, family: bool) -> _Activity:
    """Whether a process (or, with `family`, a child of it) runs or is stopped, and the seconds of computing that they
    have had."""
    found = _Activity()
    for each in [pid, *(children(pid) if family else ())]:
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{each}/stat") as stat:
            # Its name, in brackets, may hold anything.
            fields = stat.read().rpartition(")")[2].split()
            found.runs |= fields[0] == "R"
            found.stopped |= fields[0] == "T"
            found.seconds += (int(fields[11]) + int(fields[12])) / _TICKS
    return found

"""The processes of a fleet by what they are, and what they hold."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from tests.e2e.fleet import Fleet

# What a command line holds -> the kind of part.
_KINDS = (
    (r"muxserve\.cli\.app", "controller"),
    (r"muxserve\.forks\.machine_parent|^muxserve vLLM parent", "vLLM parent"),
    (r"^muxserve spare vLLM parent", "spare vLLM parent"),
    (r"muxserve-memory-manager", "memory manager"),
    (r"muxserve\.unit\.scheduler", "unit scheduler"),
    (r"muxserve\.global_scheduler\.process", "global scheduler"),
    (r"muxserve\.migration\.process", "migrator"),
    (r"^muxserve warm parent", "warm parent"),
    (r"^muxserve gateway|muxserve\.gateway\.main", "gateway"),
    (r"^muxserve model", "model parent"),
    (r"^muxserve engine", "engine"),
    (r"^muxserve worker", "rank worker"),
    (r"^muxserve spare grammar compiler", "spare grammar compiler"),
    (r"^muxserve grammar compiler", "grammar compiler"),
)
CONTROLLER, GATEWAY, ENGINE = "controller", "gateway", "engine"
# It comes when there is something to compile, and what it forks for a grammar has its name.
GRAMMARS = "grammar compiler"
OTHER = "other"


@dataclass(frozen=True)
class Part:
    """One process."""

    kind: str
    name: str
    process: psutil.Process

    def __str__(self) -> str:
        return f"{self.name} ({self.process.pid})"

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    @property
    def stopped(self) -> bool:
        return bool(self.process.status() == psutil.STATUS_STOPPED)

    @property
    def alive(self) -> bool:
        """Whether it is there and was not stopped for good."""
        return self.process.is_running() and self.process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)


def parts(fleet: Fleet) -> list[Part]:
    """All that live."""
    found = []
    for process in fleet.processes():
        try:
            line = " ".join(process.cmdline()).strip()
            if not line or process.status() == psutil.STATUS_ZOMBIE:
                continue
        except psutil.Error:
            continue
        kind = next((kind for pattern, kind in _KINDS if re.search(pattern, line)), OTHER)
        unit = re.search(r"/(u\d+)/", line)
        name = line.removeprefix("muxserve ")[:40] if line.startswith("muxserve ") else kind
        found.append(Part(kind, f"{name} {unit[1]}" if unit else name, process))
    return sorted(found, key=lambda part: (part.kind, part.name, part.process.pid))


def how_many(found: list[Part], changing: Collection[str] = ()) -> Counter[str]:
    """Processes of each kind but those that come and go by themselves. What parents fork for a moment has no name
    yet."""
    return Counter(part.kind for part in found if part.kind not in (OTHER, GRAMMARS, *changing))


@dataclass
class Held:
    """What the processes of one kind hold: the most that one of them does, and memory of all together."""

    processes: int = 0
    threads: int = 0
    descriptors: int = 0
    pss_mib: float = 0.0


def census(found: list[Part]) -> dict[str, Held]:
    """What each kind of part holds now."""
    kinds: dict[str, Held] = {}
    for part in found:
        held = kinds.setdefault(part.kind, Held())
        try:
            threads, descriptors = part.process.num_threads(), part.process.num_fds()
            pss = part.process.memory_full_info().pss
        except psutil.Error:
            continue
        held.processes += 1
        held.threads = max(held.threads, threads)
        held.descriptors = max(held.descriptors, descriptors)
        held.pss_mib = round(held.pss_mib + pss / (1 << 20), 1)
    return kinds


def as_json(kinds: dict[str, Held]) -> dict[str, Any]:
    return {kind: asdict(held) for kind, held in kinds.items()}

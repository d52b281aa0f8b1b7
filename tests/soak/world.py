"""What a fault is told of the fleet that it strikes, and what it tells of itself."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.e2e.fleet import Fleet
from tests.soak.confined import SHARED_MEMORY, Confined
from tests.soak.load import Background, Questions, Tally
from tests.soak.parts import Part, parts
from tests.soak.topologies import Topology


@dataclass
class World:
    """The fleet, its load, and the tally of the requests that a fault makes itself."""

    topology: Topology
    fleet: Fleet
    place: Confined
    questions: Questions
    load: Background
    rng: random.Random
    tally: Tally = field(default_factory=Tally)

    def parts(self, *kinds: str) -> list[Part]:
        return [part for part in parts(self.fleet) if part.kind in kinds]

    def choose(self, *kinds: str) -> Part:
        """Any part of these kinds; raises LookupError if there is none now."""
        found = self.parts(*kinds)
        if not found:
            raise LookupError(f"no {' or '.join(kinds)} runs")
        return self.rng.choice(found)

    @property
    def shared_memory(self) -> Path:
        return SHARED_MEMORY


@dataclass
class Struck:
    """What was done.

    Args:
        what: in words.
        gone: parts that must be replaced, or have ended.
        since: when recovery began to count, by the monotonic clock; None: when all was done.
        untouched: parts that must be the same as before.
        faults: what went wrong meanwhile, other than requests.
    """

    what: str
    gone: list[Part] = field(default_factory=list)
    since: float | None = None
    untouched: list[Part] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


Strike = Callable[[World], Awaitable[Struck]]


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Args:
        name: `group/what`.
        strike: does it once, within 120 s.
        needs: a kind of part that the fleet must have.
        breaks_streams: it may break streams of the gateway.
    """

    name: str
    strike: Strike
    needs: str | None = None
    breaks_streams: bool = False

    @property
    def group(self) -> str:
        return self.name.split("/")[0]

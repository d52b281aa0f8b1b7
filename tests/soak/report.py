"""What a soak found: by kind of fault, by topology, and every failure with how to see it again."""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.soak.load import FAULTS, OUTCOMES, REFUSED, RIGHT, Tally

_DOCUMENTED = [outcome for outcome in OUTCOMES if outcome not in (RIGHT, REFUSED, *FAULTS)]
# Failures of one soak that are kept in full; the others are counted.
_KEPT = 100


@dataclass
class Step:
    """One fault that was tried, and what became of the requests in flight meanwhile."""

    topology: str
    number: int
    kind: str
    what: str = ""
    seconds: float = 0.0
    recovery_seconds: float | None = None
    load: Tally = field(default_factory=Tally)
    own: Tally = field(default_factory=Tally)
    faults: list[str] = field(default_factory=list)

    @property
    def failures(self) -> list[str]:
        """All that was not as promised."""
        return [*self.faults, *self.load.faults, *self.own.faults]

    @property
    def longest_seconds(self) -> float:
        """The longest request of either load, from start to end, in seconds."""
        return max(self.load.longest_seconds, self.own.longest_seconds)

    def as_json(self) -> dict[str, Any]:
        return {
            "topology": self.topology,
            "step": self.number,
            "kind": self.kind,
            "what": self.what,
            "seconds": round(self.seconds, 1),
            "recovery_seconds": None if self.recovery_seconds is None else round(self.recovery_seconds, 2),
            "load": dict(self.load.counts),
            "own": dict(self.own.counts),
            "longest_request_seconds": round(self.longest_seconds, 1),
            "failures": self.failures,
        }


def _counts(counted: Counter[str]) -> dict[str, int]:
    return {outcome: counted[outcome] for outcome in OUTCOMES if counted[outcome] or outcome in FAULTS}


def by_kind(steps: list[Step]) -> dict[str, Any]:
    """For each kind of fault: how often, requests and how they ended, times of recovery."""
    kinds: dict[str, list[Step]] = {}
    for step in steps:
        kinds.setdefault(step.kind, []).append(step)
    shown = {}
    for kind, tried in sorted(kinds.items()):
        counted = sum((step.load.counts + step.own.counts for step in tried), Counter[str]())
        times = [step.recovery_seconds for step in tried if step.recovery_seconds is not None]
        shown[kind] = {
            "tried": len(tried),
            "steps_with_failures": sum(bool(step.failures) for step in tried),
            "requests": counted.total(),
            **_counts(counted),
            "recovery_seconds": {"median": round(statistics.median(times), 2), "most": round(max(times), 2)}
            if times
            else None,
            "not_recovered": len(tried) - len(times),
            "longest_request_seconds": round(max(step.longest_seconds for step in tried), 1),
        }
    return shown


def failures(steps: list[Step], seed: int, only: str) -> dict[str, Any]:
    """Each with the command that does it again."""
    found = [
        {
            "topology": step.topology,
            "step": step.number,
            "kind": step.kind,
            "what": step.what,
            "failures": step.failures[:20],
            "again": again(step, seed, only),
        }
        for step in steps
        if step.failures
    ]
    return {"steps": len(found), "shown": found[:_KEPT]}


def again(step: Step, seed: int, only: str) -> str:
    """The command that strikes in the same way; `only` as it was given to the soak, since that decides what is when."""
    chosen = f" --only {shlex.quote(only)}" if only else ""
    at = f"--topologies {step.topology} --from-step {step.number} --steps 1"
    return f"python -m tests.soak.run --seed {seed}{chosen} {at}"


def totals(steps: list[Step]) -> dict[str, int]:
    """All requests by how they ended."""
    counted = sum((step.load.counts + step.own.counts for step in steps), Counter[str]())
    return {"requests": counted.total(), **_counts(counted)}


def table(kinds: dict[str, Any]) -> str:
    """The table of docs/reliability.md."""
    lines = [
        "| fault | tried | requests | right | refused (429, 503) | otherwise, as documented | lost or wrong "
        "| whole after (median, most) |",
        "|---|--:|--:|--:|--:|---|--:|--:|",
    ]
    for kind, each in kinds.items():
        times = each["recovery_seconds"]
        recovery = f"{times['median']:.1f} s, {times['most']:.1f} s" if times else "not"
        otherwise = ", ".join(f"{each[outcome]} {outcome}" for outcome in _DOCUMENTED if each.get(outcome))
        lost = sum(each[outcome] for outcome in FAULTS)
        lines.append(
            f"| {kind.replace('/', ': ', 1)} | {each['tried']} | {each['requests']} | {each.get(RIGHT, 0)} "
            f"| {each.get(REFUSED, 0)} | {otherwise} | {lost} | {recovery} |"
        )
    return "\n".join(lines)

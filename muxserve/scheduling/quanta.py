"""How long a lease lasts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Length(NamedTuple):
    """Steps of a lease, and the seconds after which it ends anyway."""

    steps: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Quanta:
    """Lengths of leases.

    A lease is counted in steps, as many as fit into a quantum of time at the engine's usual pace. Its bound in seconds
    is only for steps that take far longer than usual, so it is generous. While others wait (`contended`) the quantum is
    short, but at least two steps, since compute is idle for a moment at each change. When nobody does (`open`) it is
    long, and at least four steps, so that it can be renewed before it ends.
    """

    contended_steps: int = 8
    contended_seconds: float = 0.02
    least_contended_steps: int = 2
    open_steps: int = 64
    open_seconds: float = 0.1
    least_open_steps: int = 4
    prefill_seconds: float = 10.0
    slack: float = 4.0

    def decode(self, step_seconds: float, contended: bool, depth: int = 1) -> Length:
        """Length of a decode lease; `step_seconds` is the engine's usual step, 0 when not known. With `depth`
        micro-batches under way more are still to begin when half of the steps are left."""
        steps = self.decode_steps(step_seconds, contended)
        if depth > 1:
            steps = max(steps, self.least_open_steps * depth)
        quantum = self.contended_seconds if contended else self.open_seconds
        seconds = steps * step_seconds
        return Length(steps, self.slack * (seconds if seconds > quantum else quantum))

    def decode_steps(self, step_seconds: float, contended: bool) -> int:
        """Steps of a decode lease."""
        if contended:
            most, least, quantum = self.contended_steps, self.least_contended_steps, self.contended_seconds
        else:
            most, least, quantum = self.open_steps, self.least_open_steps, self.open_seconds
        if step_seconds <= 0.0:
            return most
        steps = int(quantum / step_seconds)
        if steps < least:
            steps = least
        return most if steps > most else steps

    def prefill(self, step_seconds: float, steps: int) -> Length:
        """Length of a prefill job of `steps` steps."""
        return Length(steps, max(self.prefill_seconds, self.slack * steps * step_seconds))

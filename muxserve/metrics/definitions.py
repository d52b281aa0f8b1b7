"""The definitions that the gateway, the replay and the simulator share, free of any library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


def time_per_token(first_token: float, finish: float, output_tokens: int) -> float | None:
    """TPOT: mean seconds per output token after the first; None for answers of fewer than two tokens."""
    return (finish - first_token) / (output_tokens - 1) if output_tokens > 1 else None


class Reference(NamedTuple):
    """What one request takes alone on a device of its own, seconds: the unit of SLO scales. `ttft` and `tpot` may be
    left out where only the whole latency is judged."""

    latency: float
    ttft: float | None = None
    tpot: float | None = None


@dataclass(frozen=True, slots=True)
class Objectives:
    """A model's latency objectives, seconds; None: there is none of that kind."""

    ttft: float | None = None
    tpot: float | None = None

    @classmethod
    def of_milliseconds(cls, ttft_ms: float | None, tpot_ms: float | None) -> Objectives:
        """As fleet files and specs give them."""
        return cls(None if ttft_ms is None else ttft_ms / 1e3, None if tpot_ms is None else tpot_ms / 1e3)

    @property
    def names(self) -> tuple[str, ...]:
        """Which objectives there are, and `all` for meeting every one of them; empty without any."""
        named = (("ttft", self.ttft), ("tpot", self.tpot))
        given = tuple(name for name, value in named if value is not None)
        return (*given, "all") if given else ()

    def met(self, ttft: float, tpot: float | None) -> dict[str, bool]:
        """For each of `names`, whether a completed answer meets it. An answer of one token has no TPOT (None) and
        meets every objective for it."""
        met: dict[str, bool] = {}
        if self.ttft is not None:
            met["ttft"] = ttft <= self.ttft
        if self.tpot is not None:
            met["tpot"] = tpot is None or tpot <= self.tpot
        if met:
            met["all"] = all(met.values())
        return met


def percentile(values: Sequence[float], share: float) -> float:
    """The quantile `share` in 0..1 of `values`, interpolated linearly between the two nearest, as numpy does.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)

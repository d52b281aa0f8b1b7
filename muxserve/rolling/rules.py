"""The rules by which the prefill of one model rolls over its replicas, as the fleet's processes get them."""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from muxserve.rolling.member import LatencyTargets
from muxserve.rolling.mitosis import Bounds


class RollingRules(msgspec.Struct, frozen=True):
    """Objectives in seconds (`spared` as in `LatencyTargets`), N_l and N_u, predicted prefills, and the tokens that an
    answer is expected to have until some have ended.

    `prefill` has points (tokens, seconds) of one prefill, in order of tokens: what the latency model says, before it is
    corrected by what is observed.
    """

    ttft: float
    tpot: float
    prefill: tuple[tuple[int, float], ...]
    spared: float | None = 0.25
    lower: int = 4
    upper: int = 16
    answer: int = 256

    @property
    def objectives(self) -> LatencyTargets:
        """The objectives as the policies want them.

        Raises:
            ValueError: as `LatencyTargets`.
        """
        return LatencyTargets(self.ttft, self.tpot, self.spared)

    @property
    def bounds(self) -> Bounds:
        """The bounds of a macro instance.

        Raises:
            ValueError: as `Bounds`.
        """
        return Bounds(self.lower, self.upper)

    def prefill_seconds(self, tokens: int) -> float:
        """Predicted seconds of a prefill of `tokens` tokens: between two points on the line through them, also beyond
        the last; in proportion before the first."""
        points = self.prefill
        at = bisect_left(points, (tokens, 0.0))
        if at < len(points) and points[at][0] == tokens:
            return points[at][1]
        if at == 0:
            return points[0][1] * tokens / points[0][0]
        if len(points) == 1:
            return points[0][1] * tokens / points[0][0]
        (x0, y0), (x1, y1) = (points[at - 1], points[at]) if at < len(points) else points[-2:]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)

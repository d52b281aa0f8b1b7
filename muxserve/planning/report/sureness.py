"""How sure a plan is: what becomes of it if steps take longer than predicted, by the error that predictions of the same
kind had where others measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from muxserve.costs.sources import ERRORS, CostSource
from muxserve.planning.place.prediction import Prediction
from placement.format import enumerate_words


@dataclass(frozen=True, slots=True)
class Sureness:
    """A plan whose steps take longer than `source` predicts, by the median of its errors.

    `simulated` is the simulation of it then, `short` the models that fall short of their objectives then and not
    otherwise. Of a sweep `needed` is the fewest GPUs that are enough, and `slower` those that are enough then (None:
    none of the sizes is).
    """

    source: CostSource
    simulated: Prediction | None = None
    short: tuple[str, ...] = ()
    needed: int | None = None
    slower: int | None = None

    @property
    def longer(self) -> float:
        """By which part steps take longer."""
        return ERRORS[self.source.kind].median

    @property
    def words(self) -> list[str]:
        """A sentence each: where the error is from, and what it does to the plan."""
        error = ERRORS[self.source.kind]
        were = {"measured": "measured kernels were", "roofline": "the roofline was"}[self.source.kind]
        found = [
            f"no GPU of yours was measured: {were} {error.median:.0%} off in the median, and up to {error.p90:.0%} in "
            f"nine of ten, of {error.of} (docs/costs.md)"
        ]
        if self.needed is not None:
            found.append(self._range())
        elif self.simulated is not None:
            slo, rate = self.simulated.summary.overall.slo.get("all"), self.simulated.throughput
            figures = [] if rate is None else [f"{rate:.2f} requests/s"]
            figures += [] if slo is None else [f"{slo:.1%} of the requests within their objectives"]
            lost = f"; {enumerate_words(self.short)} would fall short" if self.short else ""
            if figures or lost:
                found.append(f"if steps take {self.longer:.0%} longer: {', '.join(figures)}{lost}")
        return found

    def _range(self) -> str:
        longer = f"{self.longer:.0%} longer than predicted"
        are = f"{self.needed} GPU is" if self.needed == 1 else f"{self.needed} GPUs are"
        if self.slower == self.needed:
            return f"{are} enough also if steps take {longer}"
        otherwise = "none of these sizes is" if self.slower is None else f"{self.slower} are"
        return f"{are} enough if steps take as long as predicted; {otherwise} if they take {longer}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        error, overall = ERRORS[self.source.kind], self.simulated.summary.overall if self.simulated else None
        return {
            "costs": self.source.kind,
            "error_median": error.median,
            "error_p90": error.p90,
            "if_steps_take_longer": {
                "by": self.longer,
                "attainment": overall.slo.get("all") if overall else None,
                "throughput": self.simulated.throughput if self.simulated else None,
                "falls_short": list(self.short),
                "gpus_needed": self.slower,
            },
        }


def newly_short(before: Sequence[str], now: Sequence[str]) -> tuple[str, ...]:
    """Models that fall short now and did not before."""
    return tuple(name for name in now if name not in before)

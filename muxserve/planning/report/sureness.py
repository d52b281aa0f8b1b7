"""How sure a plan is: what becomes of it if steps take longer than predicted, by the error that predictions of the same
kind had where others measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from muxserve.costs.sources import Doubt
from muxserve.planning.place.prediction import Prediction
from placement.format import enumerate_words


@dataclass(frozen=True, slots=True)
class Sureness:
    """A plan whose steps take longer than predicted, by the median of its errors.

    `simulated` is the simulation of it then, `short` the models that fall short of their objectives then and not
    otherwise. In a sweep `needed` is the fewest GPUs that are enough, `bears` the longest steps that were found to
    leave them enough, as a part beyond the predicted ones, and `slower` the GPUs that are enough for steps as long as
    above (None: none of the sizes is).
    """

    doubt: Doubt
    simulated: Prediction | None = None
    short: tuple[str, ...] = ()
    needed: int | None = None
    slower: int | None = None
    bears: float = 0.0

    @property
    def longer(self) -> float:
        """By which part steps take longer."""
        return self.doubt.error.median

    @property
    def words(self) -> list[str]:
        """A sentence each: where the error is from, and what it does to the plan."""
        error = self.doubt.error
        were = {"measured": "measured kernels were", "roofline": "the roofline was"}[self.doubt.kind]
        found = [
            f"no GPU of yours was measured: {were} {error.median:.0%} off in the median, and up to {error.p90:.0%} in "
            f"nine of ten, of {error.of} (docs/costs.md); a fleet that serves measures yours (`muxserve profile "
            "--from-fleet`)"
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
        assert self.needed is not None, "of a sweep that has an answer"
        are = gpus_are(self.needed)
        if self.slower == self.needed:
            return f"{are} enough also if steps take {longer}"
        at_most = f"at most {self.bears:.0%} longer than" if self.bears else "as long as"
        otherwise = "none of these sizes is" if self.slower is None else f"{self.slower} are"
        return f"{are} enough if steps take {at_most} predicted; {otherwise} if they take {self.longer:.0%} longer"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        error, overall = self.doubt.error, self.simulated.summary.overall if self.simulated else None
        return {
            "costs": self.doubt.kind,
            "error_median": error.median,
            "error_p90": error.p90,
            "if_steps_take_longer": {
                "by": self.longer,
                "attainment": overall.slo.get("all") if overall else None,
                "throughput": self.simulated.throughput if self.simulated else None,
                "falls_short": list(self.short),
                "gpus_needed": self.slower,
                "gpus_enough_up_to": self.bears if self.needed is not None else None,
            },
        }


def gpus_are(count: int) -> str:
    """How a sentence about so many GPUs begins."""
    return "1 GPU is" if count == 1 else f"{count} GPUs are"


def newly_short(before: Sequence[str], now: Sequence[str]) -> tuple[str, ...]:
    """Models that fall short now and did not before."""
    return tuple(name for name in now if name not in before)

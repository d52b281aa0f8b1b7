"""The micro-batches of a pipeline: when each was where, and how they spread."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
_EVER = float("inf")


class Step(NamedTuple):
    """A micro-batch: when it was made, its prompt tokens, its sequences that decode, its seconds on the slowest
    stage."""

    made: float
    prefill: int
    decode: int
    seconds: float


class StageStep(NamedTuple):
    """A micro-batch on one stage: from when to when, seconds; its prompts, their tokens, its sequences that decode."""

    began: float
    ended: float
    prompts: int
    prefill: int
    decode: int


class CountSpread(NamedTuple):
    """A count over micro-batches: mean, standard deviation, and the second over the first (0 when the mean is)."""

    mean: float
    deviation: float
    variation: float


class MicroBatches:
    """A stage's *bubbles* are the seconds in which it does nothing although a micro-batch is in flight somewhere. All
    that takes `after` and `before` looks at that part of the time only.
    """

    def __init__(self, stages: int) -> None:
        self._made = array("d")
        self._prompts = array("q")
        self._prefill = array("q")
        self._decode = array("q")
        # By stage: when each micro-batch begins, and how long it takes.
        self._begins = [array("d") for _ in range(stages)]
        self._works = [array("d") for _ in range(stages)]
        # When the pipeline had something in flight, from and to.
        self._from = array("d")
        self._to = array("d")

    # ------------------------------------------------------------ events of the pipeline

    def made(self, now: float, prompts: int, prefill: int, decode: int) -> None:
        """A micro-batch starts, with so many prompts, tokens of these, and sequences that decode."""
        self._made.append(now)
        self._prompts.append(prompts)
        self._prefill.append(prefill)
        self._decode.append(decode)

    def works(self, stage: int, begins: float, seconds: float) -> None:
        """That stage computes the micro-batch that was made last."""
        self._begins[stage].append(begins)
        self._works[stage].append(seconds)

    def follow(self, made: list[float], begins: list[float], seconds: list[float], decode: int) -> None:
        """Micro-batches of so many sequences follow the one in flight on a single stage: each is made when the one
        before ends."""
        none = [0] * len(made)
        self._to.extend(made)
        self._from.extend(made)
        self._made.extend(made)
        self._prompts.extend(none)
        self._prefill.extend(none)
        self._decode.extend([decode] * len(made))
        self._begins[0].extend(begins)
        self._works[0].extend(seconds)

    def begins(self, now: float) -> None:
        """Something is in flight from now on."""
        self._from.append(now)

    def ends(self, now: float) -> None:
        """Nothing is in flight any more."""
        self._to.append(now)

    # ------------------------------------------------------------ asked of it

    @property
    def steps(self) -> list[Step]:
        """All micro-batches, in order."""
        return list(map(Step, self._made, self._prefill, self._decode, self._slowest().tolist()))

    def steps_of(self, stage: int) -> Iterator[StageStep]:
        """Those of one stage, in order."""
        for began, took, *what in zip(
            self._begins[stage], self._works[stage], self._prompts, self._prefill, self._decode, strict=True
        ):
            yield StageStep(began, began + took, *what)

    @property
    def tokens(self) -> int:
        """All that went through, of prompts and of answers."""
        return sum(self._prefill) + sum(self._decode)

    def active(self, after: float = 0.0, before: float = _EVER) -> float:
        """Seconds in which at least one micro-batch was in flight."""
        # A simulation that stops leaves its last micro-batches in flight, up to the last that a stage computes.
        rest = len(self._from) - len(self._to)
        last = [begins[-1] + works[-1] for begins, works in zip(self._begins, self._works, strict=True) if begins]
        to = [*self._to, *[max(last, default=0.0)] * rest] if rest else self._to
        return _overlap(np.asarray(self._from), np.asarray(to), after, before)

    def busy(self, after: float = 0.0, before: float = _EVER) -> list[float]:
        """Seconds of work of each stage."""
        found = []
        for begins, works in zip(self._begins, self._works, strict=True):
            start = np.asarray(begins)
            found.append(_overlap(start, start + np.asarray(works), after, before))
        return found

    def bubbles(self, after: float = 0.0, before: float = _EVER) -> list[float]:
        """Seconds of bubbles of each stage."""
        active = self.active(after, before)
        return [active - busy for busy in self.busy(after, before)]

    def bubble_fraction(self, after: float = 0.0, before: float = _EVER) -> float:
        """Bubbles of all stages over the time they had."""
        active = self.active(after, before)
        return sum(self.bubbles(after, before)) / (active * len(self._works)) if active else 0.0

    def spread(self, after: float = 0.0, before: float = _EVER) -> dict[str, CountSpread]:
        """How `prefill`, `decode` and all `tokens` of the micro-batches made in that time spread, and their `seconds`
        on the slowest stage."""
        made = np.asarray(self._made)
        within = (made >= after) & (made < before)
        prefill, decode = np.asarray(self._prefill)[within], np.asarray(self._decode)[within]
        return {
            "prefill": _spread(prefill.astype(np.float64)),
            "decode": _spread(decode.astype(np.float64)),
            "tokens": _spread((prefill + decode).astype(np.float64)),
            "seconds": _spread(self._slowest()[within]),
        }

    def _slowest(self) -> _Floats:
        slowest: _Floats = np.max(np.asarray([np.asarray(works) for works in self._works]), axis=0)
        return slowest


def _overlap(begins: _Floats, ends: _Floats, after: float, before: float) -> float:
    return float(np.sum(np.clip(np.minimum(ends, before) - np.maximum(begins, after), 0.0, None)))


def _spread(values: _Floats) -> CountSpread:
    if not len(values):
        return CountSpread(0.0, 0.0, 0.0)
    mean, deviation = float(np.mean(values)), float(np.std(values))
    return CountSpread(mean, deviation, deviation / mean if mean else 0.0)

"""Costs corrected by the steps that a fleet takes while it serves.

A predicted step consists of parts: what every step takes, its tokens, its (query, key) pairs, its sequences, their
context (`costs.tables`). Measured seconds are explained by factors of these parts, found by recursive least squares as
steps are reported (`costs.least_squares`; FastPP's latency model is learnt in this way):

    seconds = level * (sum of factor * part)

Factors begin at 1. They move together at first, so that a prediction that is 1.5 times wrong everywhere is mended
everywhere by a few steps of one size, and apart as far as steps of different sizes tell. Seconds contain whatever the
engine waited for: neighbours, front ends, a machine that was slow. So corrected costs are those of a step as it is in
the mean while the fleet serves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from muxserve.costs.latency import EngineCosts, EngineShape
from muxserve.costs.least_squares import RecursiveLeastSquares
from muxserve.costs.measured import at_share
from muxserve.costs.profile import DecodeCell, EngineProfile, PrefillCell, Profile, ProfiledModel
from muxserve.costs.steps import StepSums
from muxserve.costs.tables import DecodeTable, PrefillTable

PhaseName = Literal["prefill", "decode"]

# The names of the parts, as reports have them.
PARTS: dict[PhaseName, tuple[str, ...]] = {
    "prefill": ("step", "token", "pair", "sequence"),
    "decode": ("step", "sequence", "context"),
}
# Standard deviations before anything was measured: of the factor that all parts have in common, and of each part's own.
_COMMON, _OWN = 0.7, 0.3
# Standard deviation of one step beside what the factors explain, and how many steps are remembered.
_NOISE, _MEMORY_STEPS = 0.1, 5_000.0
# A report of more steps counts as so many: their errors are not independent.
_MOST_STEPS = 8
# Steps that count for the level, and how far off it may be. What took more times as long as expected counts as that:
# it says nothing of steps.
_LEVEL_STEPS, _MOST_LEVEL, _MOST_TIMES = 1_000.0, 1.25, 2.0
# Context at which a decode step has become affine in it.
_MUCH_CONTEXT = 1 << 30


class Correction(msgspec.Struct, frozen=True):
    """The learnt correction of a phase of a model: a factor of each part of the prediction (`PARTS`), measured over
    predicted seconds of the last steps, and how far a step is from the corrected costs, relatively. `steps` were
    measured in all, and took `seconds`. `level` is measured over expected seconds of the last steps: what the least
    squares, which give little weight to single slow steps, leave out of the mean."""

    factors: tuple[float, ...]
    ratio: float
    error: float
    steps: int
    seconds: float = 0.0
    level: float = 1.0


class PhaseCorrection:
    """Learns how long the steps of one phase of one engine take, beside what was predicted.

    Args:
        engines: predicted costs at one or more shares, in their order.
    """

    def __init__(self, phase: PhaseName, engines: Sequence[EngineProfile]) -> None:
        self.phase: PhaseName = phase
        self._engines = engines
        self._tables: dict[float, tuple[PrefillTable, DecodeTable]] = {}
        parts = range(len(PARTS[phase]))
        covariance = [[_COMMON**2 + (_OWN**2 if i == j else 0.0) for j in parts] for i in parts]
        self._learnt = RecursiveLeastSquares([1.0 for _ in parts], covariance, _NOISE, _MEMORY_STEPS)
        self._measured = self._predicted = 0.0
        self._level = (0.0, 0.0)
        self._steps = 0
        self._seconds = 0.0

    def observe(self, done: StepSums, share: float, decode: PhaseCorrection | None = None) -> None:
        """Steps were taken on `share` of the device.

        Args:
            decode: what is known of decode steps; for prefill steps among whose sequences some decoded.
        """
        if done.steps <= 0 or done.seconds <= 0.0:
            return
        parts = self.parts(done, share)
        predicted = sum(parts)
        seconds = done.seconds
        if self.phase == "prefill" and done.context and decode is not None:
            # They read their KV beside the tokens of all.
            reading = decode.reading(done.context, share)
            predicted += reading
            seconds = max(0.1 * seconds, seconds - decode.correction.factors[-1] * reading)
        whole = sum(parts)
        if whole <= 0.0:
            return
        error = self._learnt.observe([part / whole for part in parts], seconds / whole, min(done.steps, _MOST_STEPS))
        fade = 1.0 - min(0.5, done.steps / _MEMORY_STEPS)
        self._measured = fade * self._measured + done.seconds
        self._predicted = fade * self._predicted + predicted
        self._steps += done.steps
        self._seconds += done.seconds
        if self._steps > _LEVEL_STEPS / 2:
            expected = done.seconds - error * whole
            kept = 1.0 - min(0.5, done.steps / _LEVEL_STEPS)
            took = max(0.0, min(done.seconds, _MOST_TIMES * expected))
            self._level = kept * self._level[0] + took, kept * self._level[1] + expected

    @property
    def correction(self) -> Correction:
        """As of the last step."""
        ratio = self._measured / self._predicted if self._predicted else 1.0
        took, expected = self._level
        level = max(1.0 / _MOST_LEVEL, min(_MOST_LEVEL, took / expected)) if expected > 0.0 else 1.0
        factors, error = tuple(self._learnt.coefficients), self._learnt.scale
        return Correction(factors, ratio, error, self._steps, self._seconds, level)

    def parts(self, done: StepSums, share: float) -> list[float]:
        """What those steps consist of as predicted, seconds. All are taken to be like the mean of them."""
        prefill, decode = self._at(share)
        tokens, pairs = round(done.tokens / done.steps), round(done.pairs / done.steps)
        sequences, context = round(done.sequences / done.steps), round(done.context / done.steps)
        found: tuple[float, ...]
        if self.phase == "prefill":
            found = prefill.parts(tokens, pairs, sequences)
        else:
            found = decode.parts(max(1, sequences), context)
        return [part * done.steps for part in found]

    def seconds(self, done: StepSums, share: float) -> float:
        """How long those steps take by what is known now."""
        if not done.steps:
            return 0.0
        return _weighed(self.correction, self.parts(done, share))

    def reading(self, context: int, share: float) -> float:
        """Predicted seconds of reading so many tokens of KV."""
        _, decode = self._at(share)
        return decode.decode(1, _MUCH_CONTEXT).per_token * context

    def _at(self, share: float) -> tuple[PrefillTable, DecodeTable]:
        known = self._tables.get(share)
        if known is None:
            prefill, decode = at_share(self._engines, share)
            known = self._tables[share] = PrefillTable(prefill), DecodeTable(decode)
        return known


def corrected(engine: EngineProfile, prefill: Correction | None, decode: Correction | None) -> EngineProfile:
    """An engine's costs with what was learnt. A cell's `samples` are the steps that it was learnt from; without any it
    stays as predicted, and so does a phase of which nothing is known."""
    found = msgspec.structs.replace(engine)
    if prefill is not None and prefill.steps:
        by_tokens = PrefillTable(engine.prefill)
        found.prefill = [
            PrefillCell(*cell.place, _weighed(prefill, by_tokens.parts(*cell.work)), prefill.steps)
            for cell in engine.prefill
        ]
    if decode is not None and decode.steps:
        by_batch = DecodeTable(engine.decode)
        found.decode = [
            DecodeCell(
                *cell.place, _weighed(decode, by_batch.parts(cell.batch, cell.batch * cell.context)), decode.steps
            )
            for cell in engine.decode
        ]
    return found


def corrected_profile(
    units: Iterable[tuple[Mapping[str, Sequence[EngineProfile]], Mapping[str, Mapping[str, Correction]]]],
) -> Profile:
    """The engines of a fleet of which something was learnt, by predictions and corrections of each unit's models. Of
    several units that have an engine alike, that counts which has taken the most steps."""
    found: dict[tuple[ProfiledModel, EngineShape], tuple[int, EngineProfile]] = {}
    for predicted, learnt in units:
        for model, engines in predicted.items():
            phases = learnt.get(model, {})
            steps = sum(each.steps for each in phases.values())
            for engine in engines:
                known = found.get((engine.shape, engine.where))
                if steps and (known is None or known[0] < steps):
                    made = corrected(engine, phases.get("prefill"), phases.get("decode"))
                    found[engine.shape, engine.where] = steps, made
    return Profile(engines=[engine for _, engine in found.values()])


def _weighed(known: Correction, parts: Sequence[float]) -> float:
    """At the level of the last steps. Never nothing: not all parts of a step can be learnt to be free."""
    seconds = known.level * sum(factor * part for factor, part in zip(known.factors, parts, strict=True))
    return max(seconds, _LEAST_PART * sum(parts))


_LEAST_PART = 0.01


def predicted_cells(
    costs: EngineCosts, max_tokens: int, max_sequences: int, max_len: int
) -> tuple[list[PrefillCell], list[DecodeCell]]:
    """What `costs` make of prefill and decode steps that an engine can come to, over a grid.

    Args:
        max_tokens: of one prefill step.
        max_sequences: of one step.
        max_len: tokens of a sequence.
    """
    prefill: dict[tuple[int, int, int], PrefillCell] = {}
    for tokens in _powers(max_tokens, 2):
        places = [(1, tokens, 0)] if tokens < max_len else []
        places += [(n, tokens // n, 0) for n in _powers(min(max_sequences, tokens), 8)[1:] if tokens // n < max_len]
        if tokens < max_len // 2:
            # A chunk after others: what pairs cost apart from tokens.
            places.append((1, tokens, max_len - tokens - 1))
        for place in places:
            cell = PrefillCell(*place, 0.0)
            prefill[place] = PrefillCell(*place, costs.prefill(*cell.work))
    decode = []
    for batch in _powers(max_sequences, 2):
        for context in _powers(max_len, 4):
            total = batch * context
            decode.append(DecodeCell(batch, context, costs.decode(batch, total).seconds(total)))
    return [cell for cell in prefill.values() if cell.seconds > 0.0], [cell for cell in decode if cell.seconds > 0.0]


def _powers(most: int, base: int) -> list[int]:
    """1, the powers of `base` below `most`, and `most`."""
    found, value = [], 1
    while value < most:
        found.append(value)
        value *= base
    return [*found, max(1, most)]

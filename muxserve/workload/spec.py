"""Generated workloads as they are written on a command line: `poisson:rate=8,alpha=0.9,duration=60,lengths=sharegpt`.

The part before the colon is the arrival process: `poisson`, `gamma` (needs `cv`), `even`, `bursty-groups` (Poisson of
a few models at a time), or `conversations` (turns whose prompts hold all that was said before). docs/workload.md has
every key. Nothing is drawn here; `GeneratorSpec.loads` says what to generate.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muxserve.workload.arrivals import Arrivals, power_law_rates
from muxserve.workload.conversations import Conversations
from muxserve.workload.errors import WorkloadError
from muxserve.workload.generate import ModelLoad
from muxserve.workload.lengths import CappedLengths, Lengths
from muxserve.workload.published import parse_lengths
from muxserve.workload.shapes import FLAT, Bursts, Diurnal, Groups, ShapeFactory

_GROUPS = "bursty-groups"
_TALK = "conversations"
_CV = {"poisson": 1.0, "even": 0.0, "gamma": None, _GROUPS: 1.0, _TALK: 1.0}
_SPEC = re.compile(rf"({'|'.join(_CV)})(:.*)?", re.DOTALL)
DEFAULT_ALPHA = 0.9
EXAMPLE = "poisson:rate=8,alpha=0.9,duration=60,lengths=sharegpt,seed=1"


@dataclass(frozen=True)
class GeneratorSpec:
    """A parsed specification. `rate` is in requests per second of all models together, `duration` in seconds."""

    process: str
    rate: float | None = None
    alpha: float | None = None
    cv: float | None = None
    duration: float = 60.0
    seed: int = 0
    models: tuple[str, ...] = ()
    lengths: str = "sharegpt"
    prompt: str | None = None
    output: str | None = None
    max_prompt: int | None = None
    max_output: int | None = None
    diurnal: float | None = None
    period: float | None = None
    spread: float | None = None
    burst: float | None = None
    burst_every: float | None = None
    burst_length: float | None = None
    phase: float | None = None
    active_least: float | None = None
    active_most: float | None = None
    turns: float | None = None
    think: float | None = None
    system: int | None = None
    systems: int | None = None

    def loads(self, models: Sequence[str], rates: Mapping[str, float] | None) -> dict[str, ModelLoad]:
        """What each model gets. `rates` are the fleet's own requests per second; a `rate` scales them and an `alpha`
        replaces their skew, in the order of `models`.

        Raises:
            WorkloadError: no rate, or values that make no sense.
        """
        try:
            shared = self._rates(models, rates)
            arrivals = Arrivals(self._cv(), self._shape())
            talk = self._conversations()
        except ValueError as error:
            raise WorkloadError(f"workload {self.text()!r}: {error}") from None
        prompt = _capped(parse_lengths(self.prompt or self.lengths, "prompt"), self.max_prompt)
        output = _capped(parse_lengths(self.output or self.lengths, "output"), self.max_output)
        return {model: ModelLoad(rate, prompt, output, arrivals, talk) for model, rate in shared.items()}

    def _rates(self, models: Sequence[str], rates: Mapping[str, float] | None) -> dict[str, float]:
        total = self.rate
        if total is None:
            if rates is None:
                raise ValueError("a rate is needed, e.g. rate=8 (requests per second of all models together)")
            total = math.fsum(rates[model] for model in models)
        if self.alpha is not None or rates is None:
            return power_law_rates(models, total, DEFAULT_ALPHA if self.alpha is None else self.alpha)
        if not (total > 0 and math.isfinite(total)):
            raise ValueError(f"the rate must be positive and finite, not {total:g}")
        scale = total / math.fsum(rates[model] for model in models)
        return {model: rates[model] * scale for model in models}

    def _cv(self) -> float:
        cv = _CV[self.process]
        if cv is None:
            if self.cv is None:
                raise ValueError("gamma arrivals need cv, e.g. cv=2 (standard deviation of the gaps over their mean)")
            return self.cv
        if self.cv is not None:
            raise ValueError(f"cv is for gamma arrivals, {self.process} has a cv of {cv:g}")
        return cv

    def _conversations(self) -> Conversations | None:
        given = {"turns": self.turns, "think": self.think, "system": self.system, "systems": self.systems}
        told = {key: value for key, value in given.items() if value is not None}
        if self.process == _TALK:
            return Conversations(**told, longest=self.max_prompt)  # type: ignore[arg-type]
        if told:
            raise ValueError(f"{', '.join(told)} belong to {_TALK}")
        return None

    def _shape(self) -> ShapeFactory:
        bursts = (self.burst, self.burst_every, self.burst_length)
        groups = (self.phase, self.active_least, self.active_most)
        if self.process in (_GROUPS, _TALK) and (self.diurnal, self.period, self.spread, *bursts) != (None,) * 6:
            raise ValueError(f"{self.process} excludes diurnal and burst")
        if self.process == _GROUPS:
            usual = Groups()
            every, least, most = (
                own if given is None else given
                for own, given in zip((usual.every, usual.least, usual.most), groups, strict=True)
            )
            return Groups(every, least, most, self.seed)
        if groups != (None, None, None):
            raise ValueError(f"phase, active_least and active_most belong to {_GROUPS}")
        if self.diurnal is not None:
            if bursts != (None, None, None):
                raise ValueError("diurnal and burst exclude each other")
            return Diurnal(self.diurnal, self.period, self.spread or 0.0)
        if self.period is not None or self.spread is not None:
            raise ValueError("period and spread belong to diurnal, e.g. diurnal=0.8,period=3600")
        if self.burst is not None:
            every = self.duration / 5 if self.burst_every is None else self.burst_every
            return Bursts(self.burst, every, every / 5 if self.burst_length is None else self.burst_length)
        if bursts != (None, None, None):
            raise ValueError("burst_every and burst_length belong to burst, e.g. burst=5,burst_every=60")
        return FLAT

    def text(self) -> str:
        """The specification, normalised. It says what the duration, the seed and the lengths are even where they are
        the defaults."""
        told = {"duration", "seed", *(() if self.prompt and self.output else ("lengths",))}
        given = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name != "process" and (value != field.default or field.name in told):
                given.append(f"{field.name}={'+'.join(value) if isinstance(value, tuple) else _number(value)}")
        return f"{self.process}:{','.join(given)}"


def is_spec(text: str) -> bool:
    """Whether `text` is meant as a specification rather than a file's name."""
    return _SPEC.fullmatch(text) is not None


def parse_spec(text: str) -> GeneratorSpec:
    """
    Raises:
        WorkloadError: an unknown process or key, a key twice, or a value of the wrong kind.
    """
    found = _SPEC.fullmatch(text)
    if not found:
        raise WorkloadError(
            f"{text!r} is no workload: it begins with {', '.join(_CV)}, as in {EXAMPLE}, or is a trace file"
        )
    fields = {field.name: str(field.type) for field in dataclasses.fields(GeneratorSpec) if field.name != "process"}
    values: dict[str, object] = {}
    for part in filter(None, (found[2] or "")[1:].split(",")):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise WorkloadError(f"workload {text!r}: {key!r} is no key{hint} Keys: {', '.join(fields)}")
        if not equals or not value:
            raise WorkloadError(f"workload {text!r}: {key} needs a value, as in {EXAMPLE}")
        if key in values:
            raise WorkloadError(f"workload {text!r}: {key} is given twice")
        values[key] = _value(text, key, value, fields[key])
    if {"lengths", "prompt", "output"} <= values.keys():
        raise WorkloadError(f"workload {text!r}: lengths has no effect beside prompt and output")
    return GeneratorSpec(found[1], **values)  # type: ignore[arg-type]


def _value(text: str, key: str, value: str, kind: str) -> object:
    if kind.startswith("str"):
        return value
    if kind.startswith("tuple"):
        return tuple(name for name in value.split("+") if name)
    try:
        number = int(value) if kind.startswith("int") else float(value)
    except ValueError:
        wanted = "whole number" if kind.startswith("int") else "number"
        raise WorkloadError(f"workload {text!r}: {key} must be a {wanted}, not {value!r}") from None
    if key == "duration" and not (number > 0 and math.isfinite(number)):
        raise WorkloadError(f"workload {text!r}: duration must be positive seconds, not {value}")
    if key.startswith("max_") and number < 1:
        raise WorkloadError(f"workload {text!r}: {key} must be at least 1 token, not {value}")
    return number


def _capped(lengths: Lengths, high: int | None) -> Lengths:
    return lengths if high is None or lengths.high <= high else CappedLengths(lengths, high)


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)

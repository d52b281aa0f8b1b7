"""Workloads as they are written on a command line: `NAME:key=value,...`.

NAME is a generator's arrival process, as in `poisson:rate=8,alpha=0.9,duration=60`: `poisson`, `gamma` (needs `cv`),
`even`, `bursty-groups` (Poisson of a few models at a time), or `conversations` (each prompt holds the conversation so
far). Or it is the path of a trace file, as in `trace.csv:map=rates,duration=600`. docs/workload.md has every key.
Nothing is drawn and no trace is read here.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muxserve.workload.arrivals import Arrivals, power_law_rates
from muxserve.workload.conversations import Conversations
from muxserve.workload.errors import WorkloadError
from muxserve.workload.generate import ModelLoad
from muxserve.workload.lengths import CappedLengths, Lengths
from muxserve.workload.published import parse_lengths
from muxserve.workload.readers import FORMATS, NATIVE, TIME_UNITS
from muxserve.workload.shapes import FLAT, Bursts, Diurnal, Groups, ShapeFactory

_GROUPS = "bursty-groups"
_TALK = "conversations"
_CV = {"poisson": 1.0, "even": 0.0, "gamma": None, _GROUPS: 1.0, _TALK: 1.0}
_GENERATOR = re.compile(rf"({'|'.join(_CV)})(?::(.*))?", re.DOTALL)
# A name that is a generator's rather than a file's.
_NAME = re.compile(r"[a-z-]+")
_SWITCH = {"true": True, "yes": True, "false": False, "no": False}
_KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}
DEFAULT_ALPHA = 0.9
EXAMPLE = "poisson:rate=8,alpha=0.9,duration=60,lengths=sharegpt,seed=1"


@dataclass(frozen=True)
class TraceSpec:
    """How a trace file is read and changed on its way.

    `format` names the file's format where it is not recognised, `map` is `make_mapper`'s `how`. `start` and `duration`
    cut, in seconds of the trace; `limit` is in requests. Then `speed` divides all times, or `rate` rescales them to
    that many requests per second on average; a trace without times gets Poisson arrivals of that rate. `max_prompt` and
    `max_output` cap lengths, in tokens. `tokenizer` (a path) counts the tokens of texts, which are estimated without;
    `all_turns` takes every turn of a conversation, not the first alone. `skip_bad` leaves malformed lines out and
    counts them. `seed` is for models and times that are drawn. `time_unit` is the unit of the file's times,
    `block_tokens` the number of tokens that a hash of the file stands for, where the file leaves them open.

    Raises:
        WorkloadError: a value that makes no sense.
    """

    path: str
    format: str | None = None
    map: str = "auto"
    seed: int = 0
    start: float = 0.0
    duration: float | None = None
    limit: int | None = None
    speed: float = 1.0
    rate: float | None = None
    max_prompt: int | None = None
    max_output: int | None = None
    tokenizer: str | None = None
    all_turns: bool = False
    skip_bad: bool = False
    time_unit: str | None = None
    block_tokens: int | None = None

    def __post_init__(self) -> None:
        for key in ("speed", "rate", "duration"):
            value = getattr(self, key)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise WorkloadError(f"{self.path}: {key} must be a positive number, not {value:g}")
        if not (self.start >= 0 and math.isfinite(self.start)):
            raise WorkloadError(f"{self.path}: start must be zero or positive seconds, not {self.start:g}")
        for key in ("limit", "max_prompt", "max_output", "block_tokens"):
            count = getattr(self, key)
            if count is not None and count < 1:
                raise WorkloadError(f"{self.path}: {key} must be at least 1, not {count}")
        if self.rate is not None and self.speed != 1.0:
            raise WorkloadError(f"{self.path}: speed and rate exclude each other: both rescale time")
        for key, known in (("format", (*FORMATS, NATIVE)), ("time_unit", TIME_UNITS)):
            word = getattr(self, key)
            if word is not None and word not in known:
                raise WorkloadError(f"{self.path}: {word!r} is no {key}; there are {', '.join(known)}")

    def refuse(self, keys: Sequence[str], why: str) -> None:
        """
        Raises:
            WorkloadError: one of these is given, and would have no effect.
        """
        for key in keys:
            if getattr(self, key) not in (None, False):
                raise WorkloadError(f"{self.path}: {key} has no effect: {why}")


@dataclass(frozen=True)
class ShapeSpec:
    """How a generator's rate varies over time; docs/workload.md explains each key."""

    diurnal: float | None = None
    period: float | None = None
    spread: float | None = None
    burst: float | None = None
    burst_every: float | None = None
    burst_length: float | None = None
    phase: float | None = None
    active_least: float | None = None
    active_most: float | None = None


@dataclass(frozen=True)
class TalkSpec:
    """What conversations are like, where they differ from the usual ones."""

    turns: float | None = None
    think: float | None = None
    system: int | None = None
    systems: int | None = None


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
    shape: ShapeSpec = ShapeSpec()
    talk: TalkSpec = TalkSpec()

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
        given = _given(self.talk)
        if self.process == _TALK:
            return Conversations(**given, longest=self.max_prompt)
        if given:
            raise ValueError(f"{', '.join(given)} belong to {_TALK}")
        return None

    def _shape(self) -> ShapeFactory:
        own = self.shape
        bursts = (own.burst, own.burst_every, own.burst_length)
        groups = (own.phase, own.active_least, own.active_most)
        if self.process in (_GROUPS, _TALK) and (own.diurnal, own.period, own.spread, *bursts) != (None,) * 6:
            raise ValueError(f"{self.process} excludes diurnal and burst")
        if self.process == _GROUPS:
            usual = Groups()
            every, least, most = (
                default if given is None else given
                for default, given in zip((usual.every, usual.least, usual.most), groups, strict=True)
            )
            return Groups(every, least, most, self.seed)
        if groups != (None, None, None):
            raise ValueError(f"phase, active_least and active_most belong to {_GROUPS}")
        if own.diurnal is not None:
            if bursts != (None, None, None):
                raise ValueError("diurnal and burst exclude each other")
            return Diurnal(own.diurnal, own.period, own.spread or 0.0)
        if own.period is not None or own.spread is not None:
            raise ValueError("period and spread belong to diurnal, e.g. diurnal=0.8,period=3600")
        if own.burst is not None:
            every = self.duration / 5 if own.burst_every is None else own.burst_every
            return Bursts(own.burst, every, every / 5 if own.burst_length is None else own.burst_length)
        if bursts != (None, None, None):
            raise ValueError("burst_every and burst_length belong to burst, e.g. burst=5,burst_every=60")
        return FLAT

    def text(self) -> str:
        """The specification, normalised. It has duration, seed and lengths even where they are the defaults."""
        always = {"duration", "seed", *(() if self.prompt and self.output else ("lengths",))}
        own = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("process", "shape", "talk")
            and (getattr(self, field.name) != field.default or field.name in always)
        }
        values = {**own, **_given(self.shape), **_given(self.talk)}
        return f"{self.process}:{','.join(f'{key}={_word(value)}' for key, value in values.items())}"


def _given(part: ShapeSpec | TalkSpec) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(part).items() if value is not None}


def is_generator(text: str) -> bool:
    """Whether `text` names a generator. A file of that name comes first."""
    return _GENERATOR.fullmatch(text) is not None and not Path(text).is_file()


def parse_spec(text: str) -> GeneratorSpec | TraceSpec:
    """A workload as it is written; whether its file can be read shows later.

    Raises:
        WorkloadError: neither a generator nor a file, an unknown key, a key twice, or a value of the wrong kind.
    """
    found = _GENERATOR.fullmatch(text)
    if found is None or Path(text).is_file():
        path, keys = _path(text)
        if _NAME.fullmatch(path) and not Path(path).exists():
            near = difflib.get_close_matches(path, _CV, 1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise WorkloadError(f"there is no file {path!r} and no such generator{hint} Generators: {', '.join(_CV)}")
        return TraceSpec(path, **_values(text, keys, f"{path}:map=rates,duration=600", TraceSpec)[0])
    own, shape, talk = _values(text, found[2] or "", EXAMPLE, GeneratorSpec, ShapeSpec, TalkSpec)
    if {"lengths", "prompt", "output"} <= own.keys():
        raise WorkloadError(f"workload {text!r}: lengths has no effect beside prompt and output")
    if "duration" in own and not (own["duration"] > 0 and math.isfinite(own["duration"])):
        raise WorkloadError(f"workload {text!r}: duration must be positive seconds, not {own['duration']:g}")
    for key in ("max_prompt", "max_output"):
        if own.get(key, 1) < 1:
            raise WorkloadError(f"workload {text!r}: {key} must be at least 1 token, not {own[key]}")
    return GeneratorSpec(found[1], **own, shape=ShapeSpec(**shape), talk=TalkSpec(**talk))


def _path(text: str) -> tuple[str, str]:
    """The path of a trace file, which may have colons, and the keys behind it."""
    if Path(text).is_file():
        return text, ""
    for colon in reversed([found.start() for found in re.finditer(":", text)]):
        if Path(text[:colon]).is_file():
            return text[:colon], text[colon + 1 :]
    path, *keys = re.split(r":(?=\w+=)", text, maxsplit=1)
    return path, "".join(keys)


def _values(text: str, keys: str, example: str, *parts: type) -> list[dict[str, Any]]:
    """The values of `key=value,...`, for each of the dataclasses that have the keys."""
    scalars = [
        {f.name: str(f.type) for f in dataclasses.fields(part) if f.name not in ("process", "path", "shape", "talk")}
        for part in parts
    ]
    known = [key for fields in scalars for key in fields]
    values: list[dict[str, Any]] = [{} for _ in parts]
    for pair in filter(None, keys.split(",")):
        key, equals, value = (piece.strip() for piece in pair.partition("="))
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise WorkloadError(f"workload {text!r}: {key!r} is no key{hint} Keys: {', '.join(known)}")
        if not equals or not value:
            raise WorkloadError(f"workload {text!r}: {key} needs a value, as in {example}")
        found, fields = next((f, t) for f, t in zip(values, scalars, strict=True) if key in t)
        if key in found:
            raise WorkloadError(f"workload {text!r}: {key} is given twice")
        found[key] = _value(text, key, value, fields[key].split(" |")[0])
    return values


def _value(text: str, key: str, value: str, kind: str) -> object:
    if kind == "str":
        return value
    if kind.startswith("tuple"):
        return tuple(name for name in value.split("+") if name)
    try:
        return _SWITCH[value] if kind == "bool" else int(value) if kind == "int" else float(value)
    except (KeyError, ValueError):
        raise WorkloadError(f"workload {text!r}: {key} must be {_KINDS[kind]}, not {value!r}") from None


def _capped(lengths: Lengths, high: int | None) -> Lengths:
    return lengths if high is None or lengths.high <= high else CappedLengths(lengths, high)


def _word(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(value)
    return f"{value:g}" if isinstance(value, float) else str(value)

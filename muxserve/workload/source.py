"""`open_workload`: requests of a trace file of any known format, or of a generator."""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from muxserve.workload.arrivals import power_law_rates
from muxserve.workload.errors import WorkloadError
from muxserve.workload.generate import generate
from muxserve.workload.readers import FORMATS, NATIVE, RawRequest, ReadOptions, detect, head_of
from muxserve.workload.spec import GeneratorSpec, TraceSpec, parse_spec
from muxserve.workload.stream import LeftOut, TraceFile, cut
from muxserve.workload.text import estimated_tokens, tokenizer_counter
from muxserve.workload.trace import TraceHeader, TraceRequest, cut_content, open_trace

Mapper = Callable[[str | None], str]
UNNAMED = "model"
_WAYS = "rates, round-robin, power/ALPHA, or pairs such as gpt-4=large+*=small"


def make_mapper(how: str, models: Sequence[str], rates: Mapping[str, float] | None, seed: int) -> Mapper:
    """A function from the trace's name of a model (None: it names none) to one of `models`.

    `how` is one of:

    - `auto`: names that are among `models` stay; others go by the rates.
    - `rates`: each request is drawn with the models' rates as weights (evenly without rates).
    - `round-robin`: the models in turn.
    - `power/ALPHA`: drawn, the k-th model with weight k^-ALPHA.
    - `OLD=NEW+...`: by name; `*` stands for all others and for requests without a name.

    Draws are from `seed`. Without `models` names stay as they are.

    Raises:
        WorkloadError: `how` is none of these or names unknown models; when called, a name that no pair covers.
    """
    if not models:
        if how != "auto":
            raise WorkloadError(f"to map requests to models ({how}) name the models: a fleet, or --models")
        return lambda name: name or UNNAMED
    if "=" in how:
        return _by_name(how, models)
    if how == "round-robin":
        turn = itertools.cycle(models)
        return lambda name: next(turn)
    if how in ("auto", "rates"):
        draw = _draw(models, [1.0 if rates is None else rates[model] for model in models], seed)
        known = frozenset(models) if how == "auto" else frozenset()
        return lambda name: name if name is not None and name in known else draw()
    kind, _, alpha = how.partition("/")
    if kind == "power":
        try:
            weights = power_law_rates(models, 1.0, float(alpha))
        except ValueError:
            raise WorkloadError(f"{how!r} needs an exponent of at least 0, e.g. power/0.9") from None
        drawn = _draw(models, list(weights.values()), seed)
        return lambda name: drawn()
    raise WorkloadError(f"{how!r} is no way to map models; there are {_WAYS}")


def _draw(models: Sequence[str], weights: Sequence[float], seed: int) -> Callable[[], str]:
    if not math.fsum(weights) > 0:
        raise WorkloadError("at least one model needs a rate above 0")
    rng = random.Random(f"{seed}/models")
    summed = list(itertools.accumulate(weights))
    return lambda: rng.choices(models, cum_weights=summed)[0]


def _by_name(how: str, models: Sequence[str]) -> Mapper:
    pairs: dict[str, str] = {}
    for part in how.split("+"):
        # A model's name may hold an equals sign; ours may not, so the last one separates.
        old, equals, new = part.strip().rpartition("=")
        if not equals or not old or new not in models:
            raise WorkloadError(f"{part.strip()!r} is no pair OLD=NEW with NEW among {', '.join(models)}")
        pairs[old] = new

    def mapper(name: str | None) -> str:
        new = pairs.get(name or "*") or pairs.get("*")
        if new is None:
            raise WorkloadError(
                f"no pair maps the model {name!r} of the trace; add {name}=NAME or *=NAME for all others"
                if name
                else "the trace has requests without a model; add *=NAME"
            )
        return new

    return mapper


@dataclass
class _Seen:
    """What a pass ahead found: requests, seconds from the start to the last, names of models."""

    count: int = 0
    last: float = 0.0
    models: set[str] = field(default_factory=set)


class Workload:
    """Requests in order of arrival, from 0 s on. Every `for` reads or draws them anew and gives the same ones; nothing
    is kept in memory. `about` says in words where they come from, `models` are those that requests may go to,
    `source_models` those that the source itself names, as far as is known without reading it. `left_out` is what the
    last reading left out.

    Iterating raises TraceError at the first malformed line (unless they are skipped), WorkloadError for a model that
    cannot be mapped, and OSError where the file cannot be read. A mistake in the specification is raised when the
    workload is made.
    """

    about: str
    seed: int | None = None
    source_models: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.left_out = LeftOut()

    def __iter__(self) -> Iterator[TraceRequest]:
        raise NotImplementedError

    @property
    def models(self) -> tuple[str, ...]:
        raise NotImplementedError

    @property
    def duration(self) -> float:
        """Seconds that the workload spans: as asked for or as written, else up to its last request."""
        raise NotImplementedError


class _Generated(Workload):
    def __init__(self, spec: GeneratorSpec, models: Sequence[str], rates: Mapping[str, float] | None) -> None:
        super().__init__()
        self._spec = spec
        self._loads = spec.loads(models, rates)
        self.about, self.seed = spec.text(), spec.seed

    def __iter__(self) -> Iterator[TraceRequest]:
        return generate(self._loads, self._spec.duration, self._spec.seed)

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(self._loads)

    @property
    def duration(self) -> float:
        return self._spec.duration


class _Read(Workload):
    def __init__(self, spec: TraceSpec, models: Sequence[str], rates: Mapping[str, float] | None) -> None:
        super().__init__()
        self._spec, self._rates = spec, rates
        name = spec.format or detect(spec.path)
        assumed = _assumed(name, spec)
        count = tokenizer_counter(spec.tokenizer) if spec.tokenizer else estimated_tokens
        reading = ReadOptions(count, spec.all_turns, spec.time_unit, spec.block_tokens)
        self._file = TraceFile(spec.path, name, reading, spec.skip_bad)
        header = _header(spec.path) if name == NATIVE else None
        self.source_models = tuple(header.models) if header else ()
        self._models = tuple(models) or self.source_models
        self._written = header.duration if header else 0.0
        self.about = f"{os.path.basename(spec.path)} ({'; '.join((name, *assumed))})"
        self._mapper()

    def __iter__(self) -> Iterator[TraceRequest]:
        spec, scale, mapper = self._spec, self._scale, self._mapper()
        self.left_out = LeftOut()
        longest_prompt, longest_output = spec.max_prompt or math.inf, spec.max_output or math.inf
        for arrival, model, prompt, output, content in self._cut(self.left_out):
            assert arrival is not None
            kept = int(min(prompt, longest_prompt))
            yield TraceRequest(
                round(arrival * scale, 6),
                mapper(model),
                kept,
                int(min(output, longest_output)),
                content if kept == prompt else cut_content(content, kept),
            )

    @property
    def models(self) -> tuple[str, ...]:
        return self._models or tuple(sorted(self._seen.models))

    @property
    def duration(self) -> float:
        span = self._span if self._written > 0 and self._spec.limit is None else self._seen.last
        return span * self._scale

    def _mapper(self) -> Mapper:
        return make_mapper(self._spec.map, self._models, self._rates, self._spec.seed)

    def _cut(self, left: LeftOut) -> Iterator[RawRequest]:
        spec = self._spec
        return cut(self._file.requests(left, spec.rate, spec.seed), spec.start, spec.duration, spec.limit)

    @cached_property
    def _seen(self) -> _Seen:
        seen = _Seen()
        for raw in self._cut(LeftOut()):
            seen.count += 1
            seen.last = raw.arrival or 0.0
            seen.models.add(raw.model or UNNAMED)
        return seen

    @property
    def _span(self) -> float:
        """Seconds of the trace that are taken, by the duration that its header has."""
        return min(max(0.0, self._written - self._spec.start), self._spec.duration or math.inf)

    @property
    def _scale(self) -> float:
        """Seconds of the workload for each of the trace."""
        rate = self._spec.rate
        if rate is None or not self._file.timed:
            return 1 / self._spec.speed
        seen = self._seen
        if seen.count < 2 or seen.last <= 0:
            raise WorkloadError(f"{self._file.path}: fewer than two requests at different times cannot be given a rate")
        # A trace without a duration ends one mean gap behind its last request.
        known = self._written and not self._spec.limit
        span = self._span if known else seen.last * seen.count / (seen.count - 1)
        return seen.count / span / rate


def _assumed(name: str, spec: TraceSpec) -> list[str]:
    """What the numbers of a file mean, in words.

    Raises:
        WorkloadError: that is not certain and the specification leaves it open, or a key has no effect on this file.
        OSError: the file cannot be opened.
    """
    path, form, found = spec.path, FORMATS.get(name), []
    head = head_of(path)
    time = form.time_unit(head) if form is not None else None
    block = form.block_tokens(head) if form is not None else None
    if time is None:
        spec.refuse(["time_unit"], f"{name} has no times that are numbers of some unit")
    elif spec.time_unit is None and time.doubt:
        raise WorkloadError(
            f"{path} ({name}): in which unit are its times? {time.doubt}. Write {path}:time_unit=s, or ms"
        )
    else:
        found.append(f"times in {spec.time_unit or time.value}")
    if block is None:
        spec.refuse(["block_tokens"], f"{name} has no hashes that stand for tokens")
    elif spec.block_tokens is None and block.doubt:
        raise WorkloadError(
            f"{path} ({name}): how many tokens does a hash stand for? {block.doubt}. Write {path}:block_tokens=N"
        )
    else:
        found.append(f"{spec.block_tokens or block.value} tokens per hash")
    if form is None or not form.texts:
        spec.refuse(["tokenizer", "all_turns"], f"{name} has no texts")
    elif spec.tokenizer is None:
        found.append("tokens of its texts estimated")
    return found


def _header(path: str) -> TraceHeader:
    with open_trace(path) as (header, _):
        return header


def open_workload(
    source: str | os.PathLike[str], models: Mapping[str, float] | Sequence[str] | None = None
) -> Workload:
    """The workload that `source` names: a trace file with keys for reading it, such as `trace.csv:rate=20`, or a
    generator, such as `poisson:rate=8,duration=60`.

    `models` are the fleet's; as a mapping they come with their rates in requests per second, which weigh the mapping of
    foreign traces and drive generators that name no rate. Without them a file keeps its own names, and a generator must
    name models.

    Raises:
        WorkloadError: a specification or a file that cannot be used.
        OSError: the file cannot be opened.
    """
    text = os.fspath(source)
    spec = parse_spec(text)
    rates = dict(models) if isinstance(models, Mapping) else None
    names = tuple(models or ())
    if isinstance(spec, TraceSpec):
        return _Read(spec, names, rates)
    if names and spec.models:
        strange = [name for name in spec.models if name not in names]
        if strange:
            raise WorkloadError(f"workload {text!r}: {', '.join(strange)} is not among {', '.join(names)}")
    chosen = spec.models or names
    if not chosen:
        raise WorkloadError(f"workload {text!r}: name the models, as in models=large+small, or give a fleet")
    return _Generated(spec, chosen, rates)

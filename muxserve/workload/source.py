"""`open_workload`: requests from a trace file of any known format, or from a generator's specification."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from msgspec import structs

from muxserve.workload.arrivals import power_law_rates
from muxserve.workload.errors import WorkloadError
from muxserve.workload.generate import generate
from muxserve.workload.readers import FORMATS, NATIVE, TIME_UNITS, RawRequest, ReadOptions, detect, head_of
from muxserve.workload.spec import GeneratorSpec, is_spec, parse_spec
from muxserve.workload.stream import LeftOut, TraceFile, cut
from muxserve.workload.text import estimated_tokens, tokenizer_counter
from muxserve.workload.trace import TraceHeader, TraceRequest, cut_content, open_trace

Mapper = Callable[[str | None], str]
UNNAMED = "model"
_WAYS = "rates, round-robin, power:ALPHA, or pairs such as gpt-4=large,*=small"


def make_mapper(how: str, models: Sequence[str], rates: Mapping[str, float] | None, seed: int) -> Mapper:
    """A function from the trace's name of a model (None: it names none) to one of `models`.

    `how` is one of:

    - `auto`: names that are among `models` stay; others go by the rates.
    - `rates`: each request is drawn with the models' rates as weights (evenly without rates).
    - `round-robin`: the models in turn.
    - `power:ALPHA`: drawn, the k-th model with weight k^-ALPHA.
    - `OLD=NEW,...`: by name; `*` stands for all others and for requests without a name.

    Draws are from `seed`. Without `models` names stay as they are.

    Raises:
        WorkloadError: `how` is none of these or names unknown models; when called, a name that no pair covers.
    """
    if not models:
        if how != "auto":
            raise WorkloadError(f"to map requests to models ({how}) say which models: a fleet, or --models")
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
    kind, _, alpha = how.partition(":")
    if kind == "power":
        try:
            weights = power_law_rates(models, 1.0, float(alpha))
        except ValueError:
            raise WorkloadError(f"{how!r} needs an exponent of at least 0, e.g. power:0.9") from None
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
    for part in how.split(","):
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


@dataclass(frozen=True)
class WorkloadOptions:
    """How a workload is read and changed on its way.

    `format` names the file's format where it is not recognised. `mapping` is `make_mapper`'s `how`. `start` and
    `duration` cut, in seconds of the trace; `limit` is in requests. Then `speed` divides all times, or `rate` rescales
    them so that this many requests per second come on average; a trace without times gets Poisson arrivals of that
    rate, a generator draws with it. `max_prompt` and `max_output` cap lengths, in tokens. `tokenizer` (a path) counts
    the tokens of texts, which are estimated without; `all_turns` takes every turn of a conversation, not the first
    alone. `skip_bad` leaves malformed lines out and counts them. `seed` is for what is drawn beside a file. `time_unit`
    (s, ms, us, ns) is what times of a file count, `block_tokens` how many tokens of a prompt a hash stands for, where
    the file leaves that open.

    Raises:
        WorkloadError: a value that makes no sense.
    """

    format: str | None = None
    mapping: str = "auto"
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
        for name, value in (("speed", self.speed), ("rate", self.rate), ("duration", self.duration)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise WorkloadError(f"{name} must be a positive number, not {value:g}")
        if not (self.start >= 0 and math.isfinite(self.start)):
            raise WorkloadError(f"start must be zero or positive seconds, not {self.start:g}")
        for name in ("limit", "max_prompt", "max_output", "block_tokens"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise WorkloadError(f"{name} must be at least 1, not {count}")
        if self.rate is not None and self.speed != 1.0:
            raise WorkloadError("speed and rate exclude each other: both rescale time")
        if self.format is not None and self.format not in (*FORMATS, NATIVE):
            raise WorkloadError(f"{self.format!r} is no format; there are {', '.join((*FORMATS, NATIVE))}")
        if self.time_unit is not None and self.time_unit not in TIME_UNITS:
            raise WorkloadError(f"{self.time_unit!r} is no unit of time; there are {', '.join(TIME_UNITS)}")

    def refuse(self, names: Sequence[str], why: str) -> None:
        """
        Raises:
            WorkloadError: one of these is given, and would have no effect.
        """
        for name in names:
            if getattr(self, name) not in (None, False):
                raise WorkloadError(f"--{name.replace('_', '-')} has no effect: {why}")


@dataclass
class _Seen:
    """What a pass ahead found: requests, seconds from the start to the last, names of models."""

    count: int = 0
    last: float = 0.0
    models: set[str] = field(default_factory=set)


class Workload:
    """Requests in order of arrival, from 0 s on. Every `for` reads or draws them anew and gives the same ones; nothing
    is kept in memory. `about` says in words where they come from, `left_out` what the last reading left out.

    Iterating raises TraceError at the first malformed line (unless they are skipped), WorkloadError for a model that
    cannot be mapped, and OSError where the file cannot be read. What is wrong with specification and options is told
    when it is made.
    """

    about: str
    seed: int | None

    def __init__(self, models: Sequence[str], rates: Mapping[str, float] | None, options: WorkloadOptions) -> None:
        self._models = tuple(models)
        self._rates = rates
        self._options = options
        self.left_out = LeftOut()

    def __iter__(self) -> Iterator[TraceRequest]:
        options = self._options
        scale, mapper = self._scale, self._mapper()
        self.left_out = LeftOut()
        longest_prompt, longest_output = options.max_prompt or math.inf, options.max_output or math.inf
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
        """The models that requests may go to; of a file read without a fleet, those that it names."""
        return self._models or tuple(sorted(self._seen.models))

    @property
    def source_models(self) -> tuple[str, ...]:
        """The models that the source itself names, as far as is known without reading it."""
        return ()

    @property
    def duration(self) -> float:
        """Seconds that the workload spans: as asked for or as written, else up to its last request."""
        options, whole = self._options, self._whole
        if options.limit is None and whole > 0:
            return min(max(0.0, whole - options.start), options.duration or math.inf) * self._scale
        return self._seen.last * self._scale

    def _cut(self, left: LeftOut) -> Iterator[RawRequest]:
        return cut(self._raw(left), self._options.start, self._options.duration, self._options.limit)

    @cached_property
    def _seen(self) -> _Seen:
        seen = _Seen()
        for raw in self._cut(LeftOut()):
            seen.count += 1
            seen.last = raw.arrival or 0.0
            seen.models.add(raw.model or UNNAMED)
        return seen

    # What a source has of its own.

    def _raw(self, left: LeftOut) -> Iterator[RawRequest]:
        raise NotImplementedError

    def _mapper(self) -> Mapper:
        raise NotImplementedError

    @property
    def _whole(self) -> float:
        """Seconds of the whole source, 0 where it does not say."""
        raise NotImplementedError

    @property
    def _scale(self) -> float:
        """Seconds of the workload for each of the source."""
        return 1 / self._options.speed


class _Generated(Workload):
    def __init__(
        self, spec: GeneratorSpec, models: Sequence[str], rates: Mapping[str, float] | None, options: WorkloadOptions
    ) -> None:
        if options.rate is not None:
            spec = dataclasses.replace(spec, rate=options.rate)
        if options.mapping != "auto":
            raise WorkloadError(f"{spec.text()!r} is generated for its models; there is nothing to map to others")
        of_files = ("format", "tokenizer", "all_turns", "skip_bad", "time_unit", "block_tokens")
        options.refuse(of_files, f"{spec.text()!r} is generated, not read from a file")
        super().__init__(models, rates, options)
        self._spec = spec
        self._loads = spec.loads(models, rates)
        self.about, self.seed = spec.text(), spec.seed

    def _raw(self, left: LeftOut) -> Iterator[RawRequest]:
        for request in generate(self._loads, self._spec.duration, self._spec.seed):
            yield RawRequest(*structs.astuple(request))

    def _mapper(self) -> Mapper:
        return lambda name: name or UNNAMED

    @property
    def _whole(self) -> float:
        return self._spec.duration


class _Read(Workload):
    def __init__(
        self, path: str, models: Sequence[str], rates: Mapping[str, float] | None, options: WorkloadOptions
    ) -> None:
        super().__init__(models, rates, options)
        name = options.format or detect(path)
        assumed = _assumed(path, name, options)
        count = tokenizer_counter(options.tokenizer) if options.tokenizer else estimated_tokens
        reading = ReadOptions(count, options.all_turns, options.time_unit, options.block_tokens)
        self._file = TraceFile(path, name, reading, options.skip_bad)
        self._header = _header(path) if name == NATIVE else None
        if self._header and not models:
            self._models = tuple(self._header.models)
        self.about, self.seed = f"{os.path.basename(path)} ({'; '.join((name, *assumed))})", None
        self._mapper()

    @property
    def source_models(self) -> tuple[str, ...]:
        return tuple(self._header.models) if self._header else ()

    def _raw(self, left: LeftOut) -> Iterator[RawRequest]:
        return self._file.requests(left, self._options.rate, self._options.seed)

    def _mapper(self) -> Mapper:
        return make_mapper(self._options.mapping, self._models, self._rates, self._options.seed)

    @property
    def _whole(self) -> float:
        return self._header.duration if self._header else 0.0

    @property
    def _scale(self) -> float:
        rate = self._options.rate
        if rate is None or not self._file.timed:
            return 1 / self._options.speed
        seen = self._seen
        if seen.count < 2 or seen.last <= 0:
            raise WorkloadError(f"{self._file.path}: fewer than two requests at different times cannot be given a rate")
        # Where nobody says how long the source is, it ends one mean gap behind its last request.
        whole = min(max(0.0, self._whole - self._options.start), self._options.duration or math.inf)
        span = whole if self._whole and not self._options.limit else seen.last * seen.count / (seen.count - 1)
        return seen.count / span / rate


def _assumed(path: str, name: str, options: WorkloadOptions) -> list[str]:
    """What the numbers of a file are taken to mean, in words.

    Raises:
        WorkloadError: that is not certain and nobody says it, or somebody says what has no effect on this file.
        OSError: the file cannot be opened.
    """
    form, head, found = FORMATS.get(name), head_of(path), []
    time = form.time_unit(head) if form is not None else None
    block = form.block_tokens(head) if form is not None else None
    if time is None:
        options.refuse(["time_unit"], f"{path} ({name}) has no times that are numbers of some unit")
    elif options.time_unit is None and time.doubt:
        raise WorkloadError(f"{path} ({name}): in which unit are its times? {time.doubt}. Say so: --time-unit s, or ms")
    else:
        found.append(f"times in {options.time_unit or time.value}")
    if block is None:
        options.refuse(["block_tokens"], f"{path} ({name}) has no hashes that stand for tokens")
    elif options.block_tokens is None and block.doubt:
        raise WorkloadError(
            f"{path} ({name}): how many tokens does a hash stand for? {block.doubt}. Say so: --block-tokens"
        )
    else:
        found.append(f"{options.block_tokens or block.value} tokens per hash")
    if form is None or not form.texts:
        options.refuse(["tokenizer", "all_turns"], f"{path} ({name}) has no texts")
    elif options.tokenizer is None:
        found.append("tokens of its texts estimated")
    return found


def _header(path: str) -> TraceHeader:
    with open_trace(path) as (header, _):
        return header


def open_workload(
    source: str | os.PathLike[str],
    models: Mapping[str, float] | Sequence[str] | None = None,
    options: WorkloadOptions | None = None,
) -> Workload:
    """The workload that `source` names: a trace file, or a generator's specification such as
    `poisson:rate=8,duration=60`.

    `models` are the fleet's; as a mapping they come with their rates in requests per second, which weigh the mapping of
    foreign traces and drive generators that name no rate. Without them a file keeps its own names, and a specification
    must name models.

    Raises:
        WorkloadError: a specification, an option or a file that cannot be used.
        OSError: the file cannot be opened.
    """
    options = options or WorkloadOptions()
    text = os.fspath(source)
    rates = dict(models) if isinstance(models, Mapping) else None
    names = tuple(models or ())
    if not is_spec(text) or Path(text).is_file():
        return _Read(text, names, rates, options)
    spec = parse_spec(text)
    if names and spec.models:
        strange = [name for name in spec.models if name not in names]
        if strange:
            raise WorkloadError(f"workload {text!r}: {', '.join(strange)} is not among {', '.join(names)}")
    chosen = spec.models or names
    if not chosen:
        raise WorkloadError(f"workload {text!r}: name the models, as in models=large+small, or give a fleet")
    return _Generated(spec, chosen, rates, options)

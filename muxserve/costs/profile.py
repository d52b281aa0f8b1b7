"""The profile file: measured step times of engines, as JSON. docs/costs.md describes the format."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

import msgspec

from muxserve.costs.architecture import ModelArchitecture
from muxserve.costs.latency import CostError, EngineShape


class PrefillCell(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A prefill step of `sequences` prompts, each computing `tokens` tokens after `context` earlier ones, took
    `seconds` (the median of `samples` steps)."""

    sequences: int
    tokens: int
    context: int
    seconds: float
    samples: int = 1

    @property
    def total(self) -> int:
        """Tokens of the whole step."""
        return self.sequences * self.tokens

    @property
    def pairs(self) -> int:
        """(query, key) pairs of attention."""
        return self.sequences * (self.tokens * self.context + self.tokens * (self.tokens + 1) // 2)

    @property
    def work(self) -> tuple[int, int, int]:
        """Tokens, pairs and sequences of the step, as cost models want them."""
        return self.total, self.pairs, self.sequences

    @property
    def place(self) -> tuple[int, int, int]:
        """Where it lies in the grid."""
        return self.sequences, self.tokens, self.context


class DecodeCell(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A decode step of `batch` sequences with `context` tokens of KV each took `seconds` (the median of `samples`)."""

    batch: int
    context: int
    seconds: float
    samples: int = 1

    @property
    def place(self) -> tuple[int, int]:
        """Where it lies in the grid."""
        return self.batch, self.context


VERSION = 1


class ProfiledModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """What tells models apart whose steps take differently long: shape, quantisation and type of the KV cache, but not
    names or limits."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int
    experts: int = 1
    active_experts: int = 1
    shared_intermediate: int = 0
    quantisation: str = ""
    weight_bits: float = 0.0
    window: int = 0
    windowed_layers: int = 0
    kv_cache: str = ""

    @classmethod
    def of(cls, architecture: ModelArchitecture) -> ProfiledModel:
        """The shape of an architecture."""
        return cls(**{field: getattr(architecture, field) for field in cls.__struct_fields__})

    def architecture(self, name: str) -> ModelArchitecture:
        """An architecture of this shape, for computing how much work its steps are; its limits mean nothing."""
        return ModelArchitecture(
            name=name,
            max_len=1 << 30,
            default_max_len=1 << 30,
            dtype="bfloat16",
            **{field: getattr(self, field) for field in self.__struct_fields__},
        )


class EngineProfile(msgspec.Struct, omit_defaults=True):
    """Cells of one model on devices of one type in one way."""

    model: str
    shape: ProfiledModel
    device: str
    dtype: str
    tp: int = 1
    share: float = 1.0
    prefill: list[PrefillCell] = []
    decode: list[DecodeCell] = []

    @property
    def where(self) -> EngineShape:
        """The shape of the engine that was measured."""
        return EngineShape(self.device, self.tp, self.share, self.dtype)

    def __str__(self) -> str:
        return f"{self.model} on {self.tp} x {self.device} at {self.share:.0%} in {self.dtype}"


class Overheads(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds outside of steps, as profiles have them and as the simulator counts them.

    `request`: from the client to the unit's queue. `turn`: from granting a lease to an idle engine to hearing of its
    first step, beyond the step itself; half of it passes on each way. `between`: from the end of one step to the start
    of the next. `token`: from an engine to the client. `stall`: a step that finds no pages.

    Raises:
        ValueError: one of them is negative, or `stall` is 0.
    """

    request: float = 0.0
    turn: float = 0.0
    between: float = 0.0
    token: float = 0.0
    stall: float = 0.001

    def __post_init__(self) -> None:
        for name in ("request", "turn", "between", "token"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"the overhead {name!r} must be zero or positive seconds, not {getattr(self, name)}")
        if not self.stall > 0.0:
            raise ValueError(f"the overhead 'stall' must be above zero seconds, not {self.stall}")

    @property
    def way(self) -> float:
        """Seconds from a decision to the engine, and from an engine's report to the unit scheduler."""
        return self.turn / 2.0


class MeasuredMachine(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the device was measured to reach with all `cores`: `flops` per second of a large matrix product by dtype,
    bytes per second that a large copy reads and writes. `name` tells it from others of its type."""

    name: str
    bandwidth: float
    flops: dict[str, float]
    cores: int


class Profile(msgspec.Struct):
    """A profile file. `machines` and `overheads` are by device."""

    muxserve_profile: int = VERSION
    about: str = ""
    machines: dict[str, MeasuredMachine] = {}
    engines: list[EngineProfile] = []
    overheads: dict[str, Overheads] = {}

    def find(self, model: ProfiledModel, where: EngineShape) -> EngineProfile | None:
        """The engine measured exactly so."""
        for engine in self.engines:
            if engine.shape == model and engine.where == where:
                return engine
        return None


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile file.

    Raises:
        CostError: it cannot be read, or it is no profile of a version that is known; the message names the file.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise CostError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        version = msgspec.json.decode(data, type=_Version).muxserve_profile
        if version != VERSION:
            raise CostError(f"{path}: is of version {version}; this program reads version {VERSION}")
        profile = msgspec.json.decode(data, type=Profile)
    except msgspec.DecodeError as error:
        raise CostError(f"{path}: is not a profile as `muxserve profile` writes it: {error}") from None
    for engine in profile.engines:
        _check(engine, path)
    return profile


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile file; whoever reads it meanwhile sees the old one or the new one, never a part.

    Raises:
        OSError: it cannot be written.
    """
    target = Path(path)
    text = msgspec.json.format(msgspec.json.encode(profile), indent=1)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(_compact(text) + b"\n")
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


class _Version(msgspec.Struct):
    muxserve_profile: int


def _check(engine: EngineProfile, path: str | os.PathLike[str]) -> None:
    if not 0.0 < engine.share <= 1.0 or engine.tp < 1:
        raise CostError(f"{path}: {engine}: share must be in (0, 1] and tp at least 1")
    prefill: list[tuple[tuple[int, ...], float]] = [(cell.place, cell.seconds) for cell in engine.prefill]
    decode: list[tuple[tuple[int, ...], float]] = [(cell.place, cell.seconds) for cell in engine.decode]
    for phase, cells, least in (("prefill", prefill, (1, 1, 0)), ("decode", decode, (1, 0))):
        for place, seconds in cells:
            if seconds <= 0.0 or any(value < low for value, low in zip(place, least, strict=True)):
                raise CostError(f"{path}: {engine}: {phase} cell {[*place, seconds]} is no measurement")
        if len({place for place, _ in cells}) != len(cells):
            raise CostError(f"{path}: {engine}: a {phase} cell is there twice")


def _compact(text: bytes) -> bytes:
    """Put arrays that hold only numbers on one line each."""
    return re.sub(rb"\[[-+0-9.eE,\s]+\]", lambda found: b"".join(found[0].split()).replace(b",", b", "), text)

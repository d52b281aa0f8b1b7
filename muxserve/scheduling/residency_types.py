"""What residency decides with and about: rules, the costs of each model, how models stand, and the changes it wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class WakeRules:
    """At most `most` models are woken at a time, on a machine of so many `cores`; fewer if that serves more requests in
    time. `ahead`: a model that was awake before is woken faster, so that each one is woken once before anybody asks.

    Raises:
        ValueError: a number that makes no sense.
    """

    most: int = 1
    cores: int = 1
    ahead: bool = False

    def __post_init__(self) -> None:
        if min(self.most, self.cores) < 1:
            raise ValueError("wakes at a time and cores must be positive")


# Part of KV pools that stays free for what comes next while models take memory from them.
LEAST_POOL_PART = 1 / 8


@dataclass(frozen=True, slots=True)
class KvRules:
    """KV pools that take what models leave: at most `most` bytes, and `least` bytes more than their running requests
    need."""

    least: int
    most: int

    @classmethod
    def of(cls, most: int) -> KvRules:
        """The rules of pools of so many bytes."""
        return cls(int(LEAST_POOL_PART * most), most)


@dataclass(frozen=True, slots=True)
class ResidencyRules:
    """Everything together takes at most `limit` bytes. What is no model counts as `fixed` bytes until it was measured,
    and then as what was measured and `fixed_margin`.

    A model stays awake for `min_residence` seconds and for `residence_factor` times what waking it takes, so that
    waking takes a bounded part of the time. A request that has waited for `max_wait` seconds goes before all that have
    not, and nobody takes memory that it needs. A model with running requests is put to sleep only when another has
    waited for `patience` seconds. Rates of arrivals are averages over each of the `windows`, seconds; the largest
    counts. Putting an idle model to sleep takes `sleep_seconds` until that was measured.

    `kv`: the memory has KV pools that models get memory from; None: what pools take is `fixed`.

    `ceiling`, bytes: a model that never has room below `limit` is woken beyond it, up to this; None: without end. With
    the limit itself, as of a GPU's memory, nothing is woken beyond it.

    Raises:
        ValueError: a number that makes no sense.
    """

    limit: int
    min_residence: float = 2.0
    residence_factor: float = 4.0
    max_wait: float = 10.0
    patience: float = 0.5
    windows: tuple[float, ...] = (5.0, 60.0, 600.0)
    wakes: WakeRules = WakeRules()
    sleep_seconds: float = 0.0
    fixed: int = 0
    fixed_margin: int = 0
    kv: KvRules | None = None
    ceiling: int | None = None

    def __post_init__(self) -> None:
        if self.limit < 1 or not self.windows or min(self.windows) <= 0:
            raise ValueError("limit and windows must be positive")
        if min(self.min_residence, self.residence_factor, self.max_wait, self.patience, self.sleep_seconds) < 0:
            raise ValueError("times must not be negative")

    @property
    def always(self) -> int:
        """Bytes that are taken whichever models are awake, as far as was declared."""
        return self.fixed + (self.kv.least if self.kv is not None else 0)


@dataclass(frozen=True, slots=True)
class WakeCosts:
    """What a model takes, as expected before it was awake for the first time: bytes while it is awake, `load_bytes`
    more while it is being woken, seconds to wake it; and its objectives for the first token and for the time between
    tokens, seconds. From one measurement to the next it takes at most `margin` bytes more. `pinned`: it never
    sleeps."""

    bytes: int
    load_bytes: int = 0
    seconds: float = 1.0
    ttft: float = 5.0
    pinned: bool = False
    margin: int = 0
    tpot: float = 0.1


class Residence(Enum):
    """Where a model is: `leaving` finishes what runs, and sleeps then."""

    ASLEEP = "asleep"
    WAKING = "waking"
    AWAKE = "awake"
    LEAVING = "leaving"


@dataclass(frozen=True, slots=True)
class Standing:
    """How a model stands: where it is and since when; its running requests; when those that wait for it arrived; and
    the bytes that were measured of it (0: not measured), a private KV cache included."""

    model: str
    residence: Residence
    since: float
    running: int = 0
    waiting: Sequence[float] = ()
    held: int = 0


@dataclass(frozen=True, slots=True)
class Wake:
    """Wake the model. `beyond`: the bytes by which the limit will be exceeded, since it never has room below it."""

    model: str
    beyond: int = 0


@dataclass(frozen=True, slots=True)
class Sleep:
    """Let the model finish what runs and sleep; `reason` for the user. `ahead`: nobody waits for its memory yet."""

    model: str
    reason: str
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Stay:
    """The model, which was told to sleep, is needed more than others by now."""

    model: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The model cannot be woken, since `missing` bytes would be missing if all others slept: answer its requests."""

    model: str
    missing: int


Change = Wake | Sleep | Stay | Refuse

"""How many bytes each model takes: declared at first, then learnt from measurements; and the balance of one memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from muxserve.scheduling.residency_types import Residence, Standing, WakeCosts

# Measurements of a model count from the second one on, and for the three residences after their own.
_BELIEVED, _REMEMBERED = 2, 3


@dataclass(slots=True)
class _Measured:
    """The measured bytes of one model. `peak`: the most in this residence, after `measurements` of them; `peaks`: the
    same of earlier residences. `wake_peaks`: the most that each of its last wakes took. `wake_unmeasured`: the last
    wake is not among them yet."""

    costs: WakeCosts
    peak: int = 0
    measurements: int = 0
    peaks: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    wake_peaks: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    wake_unmeasured: bool = True

    @property
    def awake(self) -> int | None:
        """Bytes of the awake model, with its margin; None before there are enough measurements."""
        if self.measurements < _BELIEVED and not self.peaks:
            return None
        most = max(self.peak, *self.peaks, 0)
        return max(most, min(self.costs.bytes, most + self.costs.margin))

    @property
    def waking(self) -> int | None:
        """Bytes at the peak of a wake, with the margin; None before one was measured."""
        declared = self.costs.bytes + self.costs.load_bytes
        return min(declared, max(self.wake_peaks) + self.costs.margin) if self.wake_peaks else None


@dataclass(slots=True)
class Balance:
    """Bytes that are `free`, those `promised` by models that are leaving, and those `lent` to KV pools. Reserved bytes
    are in none of them. `recalled` ones are those that the pools are to give back."""

    free: int
    promised: int
    lent: int = 0
    recalled: int = 0

    @property
    def available(self) -> int:
        """Bytes that are free, or will be when the leaving models sleep and KV pools give back what was lent."""
        return self.free + self.promised + self.lent

    def reserve(self, need: int) -> None:
        """Set aside the bytes that a waiting model needs: free ones first, lent ones last."""
        left = self.free + self.promised - need
        self.free = max(0, self.free - need)
        self.promised = max(0, left - self.free)
        self._recall(-left)

    def cover(self) -> None:
        """Recall lent bytes as far as more is taken than there is."""
        before = self.recalled
        self._recall(-self.free - self.promised)
        self.promised += self.recalled - before

    def _recall(self, missing: int) -> None:
        back = min(self.lent, max(0, missing))
        self.lent -= back
        self.recalled += back


class ModelSizes:
    """The bytes of all models of one memory, by name."""

    def __init__(self) -> None:
        self._models: dict[str, _Measured] = {}
        self._expected: dict[str, int] = {}
        self._needs: dict[str, int] = {}

    def change(self, models: Mapping[str, WakeCosts]) -> None:
        """Other models; the measurements of models whose costs are the same are kept."""
        self._models = {
            name: known if (known := self._models.get(name)) is not None and known.costs == costs else _Measured(costs)
            for name, costs in models.items()
        }
        self._estimate()

    def measured(self, model: str, held: int, wake_peak: int = 0) -> None:
        """The awake model takes `held` bytes, and took `wake_peak` at most while it was woken (0: unknown)."""
        known = self._models[model]
        known.measurements += 1
        known.peak = max(known.peak, held)
        if wake_peak and known.wake_unmeasured:
            known.wake_unmeasured = False
            known.wake_peaks.append(wake_peak)
        self._estimate()

    def woke(self, model: str) -> None:
        """A residence of the model begins."""
        known = self._models[model]
        known.wake_unmeasured = True
        if known.measurements >= _BELIEVED:
            known.peaks.append(known.peak)
            known.peak = known.measurements = 0

    def expected(self, model: str) -> int:
        """Bytes that the awake model may come to take before it is measured again: the most that was measured in its
        last residences, with its margin. Unmeasured model: its declared bytes, less the smallest excess of declared
        over measured bytes among the models of at least its size. A smaller model's processes take no more besides its
        weights."""
        return self._expected[model]

    def needs(self, model: str) -> int:
        """Bytes that have to be free to wake the model: the larger one of its peak in its last wakes and `expected`.
        Before a wake was measured, its peak is estimated as `expected` is."""
        return self._needs[model]

    def taken(self, standing: Standing) -> int:
        """Bytes that count for a model now: those that it may come to take, since nobody measures it meanwhile."""
        if standing.residence is Residence.ASLEEP:
            return 0
        if standing.residence is Residence.WAKING:
            return self._needs[standing.model]
        return max(standing.held, self._expected[standing.model])

    def balance(self, room: int, standings: Iterable[Standing]) -> Balance:
        """The balance of `room` bytes for these models."""
        balance = Balance(room, 0)
        for each in standings:
            taken = self.taken(each)
            balance.free -= taken
            if each.residence is Residence.LEAVING:
                balance.promised += taken
        return balance

    def _estimate(self) -> None:
        """Compute `expected` and `needs` of all models."""
        excess: list[tuple[int, int]] = []
        wake_excess: list[tuple[int, int]] = []
        for each in self._models.values():
            costs = each.costs
            if (awake := each.awake) is not None:
                excess.append((costs.bytes, costs.bytes - awake))
            if (waking := each.waking) is not None:
                wake_excess.append((costs.bytes, costs.bytes + costs.load_bytes - waking))
        self._expected, self._needs = {}, {}
        for name, each in self._models.items():
            costs = each.costs
            if (expected := each.awake) is None:
                expected = max(costs.bytes - _least(excess, costs.bytes), each.peak)
            if (waking := each.waking) is None:
                waking = costs.bytes + costs.load_bytes - _least(wake_excess, costs.bytes)
                if not wake_excess:  # no wake was measured yet: loading takes its declared bytes besides
                    waking = expected + costs.load_bytes
            self._expected[name], self._needs[name] = expected, max(expected, waking)


def _least(excess: Iterable[tuple[int, int]], size: int) -> int:
    """The smallest excess, of those by size in bytes, among models of at least `size` bytes; 0 if there is none."""
    return max(0, min((spare for declared, spare in excess if declared >= size), default=0))

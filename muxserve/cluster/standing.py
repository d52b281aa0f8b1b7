"""What the scheduler of a unit cannot see by itself: models that are served elsewhere, models that cannot be started,
and engines that give no sign of life. It hears of each as it happens, and a new one of all. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from muxserve import wire
from muxserve.cluster.events import Down, Event, PartId, Recovered, Suspected
from muxserve.cluster.restarts import DEGRADED_STARTS


class UnitStanding:
    """Standing of the models and engines of one unit.

    Args:
        retired: models that are declared in the unit and not served there.
    """

    def __init__(self, retired: Iterable[str]) -> None:
        self._retired = set(retired)
        # Models whose parts fail at each start: why, and when (monotonic seconds) that is tried again.
        self._degraded: dict[str, tuple[str, float]] = {}
        # Engines that give no sign of life, with their pids.
        self._suspects: dict[PartId, int] = {}

    @property
    def degraded(self) -> dict[str, str]:
        """Models that fail at each start, and why."""
        return {model: reason for model, (reason, _) in self._degraded.items()}

    def retire(self, model: str) -> wire.Retire:
        """The model is not served here; the others get its pages."""
        self._retired.add(model)
        self._degraded.pop(model, None)
        return wire.Retire(model)

    def revive(self, model: str) -> wire.Revive:
        """It is served here again."""
        self._retired.discard(model)
        return wire.Revive(model)

    def up(self, model: str) -> None:
        """All parts of the model are up."""
        self._degraded.pop(model, None)

    def all(self, now: float) -> list[wire.Message]:
        """What a scheduler has to hear that knows only what is declared."""
        degraded = [wire.Degraded(model, why, max(0.0, due - now)) for model, (why, due) in self._degraded.items()]
        suspects = [wire.EngineSuspect(part.model, part.phase, True, pid) for part, pid in self._suspects.items()]
        return [*map(wire.Retire, sorted(self._retired)), *degraded, *suspects]

    def note(self, event: Event, pid: int, left_out: Collection[str], now: float) -> wire.Message | None:
        """Take an event in; what the scheduler has to hear of it.

        Args:
            pid: of the part that the event is about.
            left_out: models without which the unit has started: nobody should wait for their next start.
            now: monotonic seconds.
        """
        match event:
            case Down(part, reason, restart_in, failed_starts):
                self._suspects.pop(part, None)
                hopeless = part.model in left_out and failed_starts > 0
                if part.model and (hopeless or failed_starts >= DEGRADED_STARTS):
                    why = f"{part} cannot start: {reason}"
                    self._degraded[part.model] = why, now + restart_in
                    return wire.Degraded(part.model, why, restart_in)
            case Suspected(part) if part.kind == "engine":
                self._suspects[part] = pid
                return wire.EngineSuspect(part.model, part.phase, True, pid)
            case Recovered(part) if part.kind == "engine":
                self._suspects.pop(part, None)
                return wire.EngineSuspect(part.model, part.phase, False, pid)
        return None

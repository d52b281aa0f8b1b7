"""Who is suspected, and how often which kind of process hung: what the fleet's file tells its readers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from muxserve.cluster.events import Down, Event, PartId, Recovered, Suspected
from muxserve.spec import Suspect

# Without these a unit serves nothing; without the others it serves on.
_WHOLE_UNIT = ("unit", "memory", "mps")


class Health:
    """One fleet's health. It takes every event with its unit, which is empty for processes that belong to none."""

    def __init__(self) -> None:
        self._suspects: dict[tuple[str, PartId], Suspect] = {}
        self._hangs: Counter[str] = Counter()

    @property
    def suspects(self) -> tuple[Suspect, ...]:
        """Who gives no sign of life at present."""
        return tuple(self._suspects.values())

    @property
    def hangs(self) -> dict[str, int]:
        """How often a process of each kind was killed because it hung."""
        return dict(self._hangs)

    def note(self, event: Event, unit: str, serves: Collection[str] = ()) -> bool:
        """Take in an event of a unit that serves those models; whether that has changed anything."""
        match event:
            case Suspected(part):
                self._suspects[unit, part] = Suspect(str(part), unit, _models(part, serves))
            case Recovered(part) if (unit, part) in self._suspects:
                del self._suspects[unit, part]
            case Down(part, hung=True):
                self._hangs[part.kind] += 1
                self._suspects.pop((unit, part), None)
            case _:
                return False
        return True

    def forget(self, unit: str) -> None:
        """The unit has ended, with all that was suspected in it."""
        self._suspects = {key: suspect for key, suspect in self._suspects.items() if key[0] != unit}


def _models(part: PartId, serves: Collection[str]) -> tuple[str, ...]:
    if part.kind == "engine":
        return (part.model,)
    return tuple(sorted(serves)) if part.kind in _WHOLE_UNIT else ()

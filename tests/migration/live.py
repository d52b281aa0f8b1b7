"""What the tests of live migration share: the processes of two real units, and what is seen and changed of them."""

from __future__ import annotations

import contextlib

import msgspec
import psutil

from benchmarks.two_units import MODEL, Pair, TwoUnits
from muxserve import spec
from muxserve.memory.client import MemoryClient
from tests.support.patience import PATIENCE, eventually

_MARKS = {
    "decode": f"muxserve engine {MODEL}/decode",
    "prefill": f"muxserve engine {MODEL}/prefill",
    "migrator": "muxserve.migration.process",
    "memory": "muxserve-memory-manager",
    "scheduler": "muxserve.unit.scheduler",
}


def find(pair: Pair | TwoUnits, unit: str, part: str) -> psutil.Process | None:
    """The unit's process of that part, if it runs."""
    for each in psutil.Process(pair.units[unit].process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if each.status() != psutil.STATUS_ZOMBIE and _MARKS[part] in " ".join(each.cmdline()):
                return each
    return None


def process(pair: Pair | TwoUnits, unit: str, part: str) -> psutil.Process:
    """The same, where there has to be one, or soon is again."""
    found: list[psutil.Process] = []

    def there() -> bool:
        one = find(pair, unit, part)
        found.extend([one] if one is not None else [])
        return bool(found)

    eventually(there, f"unit {unit} has no {part}")
    return found[0]


def limit(pair: Pair, bandwidth: float) -> None:
    """Have both copy so many bytes per second at most; 0: as many as they can."""
    for name, unit in pair.units.items():
        known = spec.load(unit.file)
        if known.migration_bandwidth == bandwidth:
            continue
        spec.save(msgspec.structs.replace(known, migration_bandwidth=bandwidth), unit.file)
        # Whoever is started next reads it.
        before = process(pair, name, "migrator")
        before.kill()
        eventually(
            lambda name=name, before=before: find(pair, name, "migrator") not in (None, before), "a new migrator"
        )


def used(units: TwoUnits) -> int:
    """Pages in use in both."""
    pages = 0
    for unit in units.units.values():
        with MemoryClient(unit.unit_spec.memory_socket, "test", PATIENCE) as client:
            pages += int(client.map(MODEL).counters.used_pages)
    return pages


def nothing_is_left(units: TwoUnits) -> None:
    """Wait until every page has been given back."""
    units.pump(lambda: used(units) == 0, PATIENCE)

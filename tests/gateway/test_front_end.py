"""What the gateway learns of the front end's work, from what units say and the kernel counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from muxserve.gateway.front_end import FrontEndCosts
from muxserve.gateway.status import UnitStatus
from muxserve.net.core_times import CoreTimes
from muxserve.spec import GpuSpec, UnitEntry
from tests.gateway.unit_specs import model, unit_spec
from tests.support.kernel import Kernel

# Core-seconds beside steps: of a request, a step, a token and a lease.
REQUEST, STEP, TOKEN, LEASE = 0.012, 0.0006, 0.0001, 0.0009


class Unit:
    """Answers as a unit scheduler does: of one model with two engines, so many requests, steps and tokens. Each
    engine gets a lease for each request."""

    def __init__(self) -> None:
        self.up = True
        self.epoch = "e1"
        self.requests = self.steps = self.tokens = 0
        self.computed = 0.0

    def unit_is_up(self, unit: str) -> bool:
        return self.up

    async def unit_state(self, unit: str, timeout: float) -> dict[str, object] | None:
        costs = {"prefill": {"steps": self.requests}, "decode": {"steps": self.steps - self.requests}}
        phases = {
            "prefill": {"tokens": 1_000_000, "leases": self.requests},
            "decode": {"tokens": self.tokens - self.requests, "leases": self.requests},
        }
        of_model = {"arrived": self.requests, "costs": costs, "phases": phases}
        return {"epoch": self.epoch, "core_seconds": self.computed, "models": {"m": of_model}}


class Machine:
    """Two cores, some units, and the gateway that looks at them."""

    def __init__(self, kernel: Kernel, units: int = 1, **entry: Any) -> None:
        self.kernel = kernel
        self.units = [Unit() for _ in range(units)]
        gpu = entry.pop("gpu", None)
        statuses = []
        for number, unit in enumerate(self.units):
            spec = msgspec.structs.replace(unit_spec("/nowhere", [model("m")], unit=f"u{number}"), gpu=gpu)
            statuses.append(UnitStatus(UnitEntry(spec, "ipc:///nowhere", "", ["m"], **entry), unit, self.now))
        self.costs = FrontEndCosts(lambda: statuses, kernel.cores, self.now)

    def now(self) -> float:
        return self.kernel.now

    async def serves(self, intervals: int) -> None:
        """So many intervals with work, and without."""
        for _ in range(intervals):
            await self.passes()
            await self.passes(0, 0, 0)

    async def passes(self, requests: int = 20, steps: int = 800, tokens: int = 2000, more: float = 0.0) -> None:
        """Four seconds in which each unit does so much."""
        busy = more
        for unit in self.units:
            unit.requests += requests
            unit.steps += steps
            unit.tokens += tokens
            unit.computed += steps * 0.001
            busy += steps * 0.001 + requests * (REQUEST + 2 * LEASE) + steps * STEP + tokens * TOKEN
        self.kernel.passed(4.0, busy)
        await self.costs.look()

    def of_a_mixture(self) -> float:
        """Seconds of both cores for what `passes` has."""
        found = self.costs.overheads
        assert found is not None
        leases = 2 * 20 * found.lease_work
        return 20 * found.request_work + 800 * found.step_work + 2000 * found.token_work + leases


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path / "stat")


TRUE = (20 * (REQUEST + 2 * LEASE) + 800 * STEP + 2000 * TOKEN) / 2


@pytest.mark.parametrize("units", [1, 3])
async def test_what_is_busy_beside_steps_is_the_front_end(kernel: Kernel, units: int) -> None:
    machine = Machine(kernel, units)
    await machine.costs.look()
    assert machine.costs.overheads is None
    await machine.serves(30)
    assert machine.of_a_mixture() == pytest.approx(TRUE, rel=0.1)


async def test_counts_that_begin_anew_are_no_interval(kernel: Kernel) -> None:
    machine = Machine(kernel)
    await machine.serves(20)
    before = machine.costs.overheads
    # The unit scheduler was started again.
    unit = machine.units[0]
    unit.epoch, unit.requests, unit.steps, unit.tokens, unit.computed = "e2", 0, 0, 0, 0.0
    await machine.passes()
    assert machine.costs.overheads == before
    # A model has left, with its counts.
    unit.requests -= 10
    unit.steps -= 900
    await machine.passes(0, 0, 0)
    assert machine.costs.overheads == before
    # One that does not answer has done nobody knows what.
    unit.up = False
    await machine.passes(more=4.0)
    unit.up = True
    await machine.passes(more=4.0)
    assert machine.costs.overheads == before
    await machine.serves(1)
    assert machine.of_a_mixture() == pytest.approx(TRUE, rel=0.1)


@pytest.mark.parametrize("entry", [{"remote": True}, {"gpu": GpuSpec(("GPU-1",))}])
async def test_the_cores_of_this_machine_are_not_those_of_other_engines(kernel: Kernel, entry: dict[str, Any]) -> None:
    machine = Machine(kernel, **entry)
    for _ in range(5):
        await machine.passes()
    assert machine.costs.overheads is None


async def test_a_gateway_serves_where_the_kernel_does_not_tell(caplog: pytest.LogCaptureFixture) -> None:
    def hidden() -> CoreTimes:
        raise PermissionError("no /proc/stat here")

    costs = FrontEndCosts(list, hidden)
    await costs.keep()
    assert costs.overheads is None
    assert "no /proc/stat here" in caplog.text


async def test_a_core_that_is_taken_away_ends_nothing(kernel: Kernel) -> None:
    machine = Machine(kernel)
    for _ in range(10):
        await machine.passes()
    before = machine.costs.overheads
    whole = kernel.path.read_text()
    kernel.path.write_text("cpu0 1 2 3 4 5")
    await machine.costs.look()
    kernel.path.write_text(whole)
    await machine.costs.look()
    assert machine.costs.overheads == before

"""No figure of the simulator changes unnoticed."""

from __future__ import annotations

import json

import pytest

from tests.simulator.golden import FILE, differences, scenarios

KNOWN = json.loads(FILE.read_text())
SCENARIOS = scenarios()


def test_every_scenario_is_known() -> None:
    assert SCENARIOS.keys() == KNOWN.keys()


@pytest.mark.parametrize("name", SCENARIOS)
def test_figures_are_as_they_were(name: str) -> None:
    changed = differences(KNOWN[name], SCENARIOS[name]())
    assert not changed, f"run `python -m tests.simulator.golden` and see docs/simulator.md: {'; '.join(changed)}"

"""What `benchmarks/gpu/serving.py` concludes of its results for `engines: auto` and `sm_sharing: auto`."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SHARING = {"split-green": "green_contexts", "one-free": "mps", "one-turns": "off"}


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu.serving")


def report(sharing: dict[str, str] = SHARING, **systems: tuple[float, float]) -> dict[str, Any]:
    """Each system's attainment and tokens per second at both of two points."""
    results = {
        name.replace("_", "-"): {
            point: {"slo_attainment": {"e2e": {"8": part}}, "output_tokens_per_second": speed}
            for point in ("alpha 2.1, 8/s", "alpha 2.1, 24/s")
        }
        for name, (part, speed) in systems.items()
    }
    return {"results": results, "sharing": sharing}


def test_the_way_that_attains_most_is_what_auto_should_be(serving: ModuleType) -> None:
    said = serving.decision(
        report(stock_mps=(0.80, 900.0), split_green=(0.97, 800.0), one_free=(0.90, 990.0), one_turns=(0.60, 700.0))
    )
    assert said[1] == "split-green: 97% of the requests within 8 times their latency alone, 800 tokens/s"
    assert said[-1] == (
        "best of the fleets is split-green: engines: split, sm_sharing: green_contexts; that `auto` should be"
    )


def test_where_attainment_is_the_same_throughput_decides(serving: ModuleType) -> None:
    said = serving.decision(report(split_green=(0.97, 800.0), one_free=(0.96, 990.0), one_turns=(0.60, 1200.0)))
    assert said[-1].startswith("best of the fleets is one-free: engines: one, policy: free")


def test_a_fleet_that_shared_otherwise_does_not_count(serving: ModuleType) -> None:
    sharing = {**SHARING, "split-green": "off"}
    said = serving.decision(report(sharing, split_green=(0.99, 800.0), one_free=(0.9, 990.0), one_turns=(0.8, 990.0)))
    assert said[0] == "split-green does not count: its engines shared the GPU by off"
    assert said[-1].startswith("best of the fleets is one-free")


def test_stock_servers_that_attain_more_are_mentioned(serving: ModuleType) -> None:
    said = serving.decision(report(stock_mps=(0.99, 900.0), one_free=(0.9, 990.0), one_turns=(0.8, 990.0)))
    assert said[-1] == "stock servers under MPS attain more than any fleet"


def test_points_that_not_all_have_reached_do_not_count(serving: ModuleType) -> None:
    found = report(one_free=(0.9, 990.0), one_turns=(0.5, 990.0))
    found["results"]["one-turns"].popitem()
    found["results"]["one-free"]["alpha 2.1, 24/s"]["slo_attainment"]["e2e"]["8"] = 0.0
    assert serving.decision(found)[0].startswith("one-free: 90%")


def test_one_fleet_decides_nothing(serving: ModuleType) -> None:
    assert len(serving.decision(report(stock_mps=(0.9, 900.0), one_free=(0.9, 990.0)))) == 2


def test_a_server_alone_is_shown_and_not_compared(serving: ModuleType) -> None:
    said = serving.decision(report(stock_alone=(1.0, 2000.0), one_free=(0.9, 990.0), one_turns=(0.8, 990.0)))
    assert said[0] == "stock-alone: 100% of the requests within 8 times their latency alone, 2000 tokens/s"
    assert said[-1].startswith("best of the fleets is one-free")
    assert len(serving.decision(report(stock_alone=(1.0, 2000.0)))) == 1

"""How the simulator is judged against live runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muxserve.metrics.records import RequestRecord
from muxserve.metrics.summary import Summary, summarise


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import sim_vs_live

    return sim_vs_live


def summary(factor: float) -> Summary:
    """Of requests that all took so many times as long."""
    return summarise(
        [RequestRecord("m", float(n), 64, 11, first_token=n + 0.1 * factor, finish=n + 1.1 * factor) for n in range(9)]
    )


@pytest.mark.parametrize(("simulated", "missed"), [([1.0], False), ([1.36, 1.44], False), ([1.2], True)])
def test_what_is_near_to_no_live_run_is_missed_though_it_is_between_them(
    module: Any, simulated: list[float], missed: bool
) -> None:
    runs = [SimpleNamespace(summary=summary(factor)) for factor in (1.0, 1.4)]
    rows = module.held_against(runs, [[summary(factor) for factor in simulated]] * 2)
    assert module.misses(rows) == (list(module.BARS) if missed else [])
    assert rows["latency_mean"]["spread"] == pytest.approx(0.4, abs=1e-3)
    assert module.misses_of_the_middle(rows) == list(module.BARS)
    near = [SimpleNamespace(summary=summary(factor)) for factor in (1.0, 1.08)]
    close = module.held_against(near, [[summary(1.0)]] * 2)
    assert module.misses_of_the_middle(close) == []
    assert module.misses_of_the_middle(close | {"tpot_mean": rows["tpot_mean"]}) == ["tpot_mean"]


def test_a_client_sees_all_tokens_later(module: Any) -> None:
    record = RequestRecord("m", 1.0, 64, 11, first_token=1.5, finish=2.5)
    later = module.seen_later(record, 0.25)
    assert (later.first_token, later.finish, later.tpot) == (1.75, 2.75, record.tpot)
    failed = RequestRecord("m", 1.0, 64, 11, error="refused")
    assert module.seen_later(failed, 0.25) == failed

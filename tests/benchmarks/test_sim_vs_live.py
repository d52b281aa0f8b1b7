"""How the simulator is judged against live runs."""

from __future__ import annotations

from pathlib import Path
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
    """A summary of requests that all took `factor` times as long."""
    return summarise(
        [RequestRecord("m", float(n), 64, 11, first_token=n + 0.1 * factor, finish=n + 1.1 * factor) for n in range(9)]
    )


@pytest.mark.parametrize(("factor", "part", "missed"), [(1.36, 0.6, False), (1.4, 0.6, True), (1.4, 0.9, False)])
def test_means_are_held_against_that_of_the_live_runs_where_there_is_a_bar(
    module: Any, factor: float, part: float, missed: bool
) -> None:
    rows = module.held_against([summary(1.0), summary(1.4)], summary(factor))
    assert rows["latency_mean"]["spread"] == pytest.approx(0.4, abs=1e-3)
    assert rows["latency_mean"]["error"] == pytest.approx(factor / 1.2 - 1.0, abs=1e-3)
    assert module.misses(part, rows) == (list(module.JUDGED) if missed else [])


def test_a_client_sees_all_tokens_later(module: Any) -> None:
    record = RequestRecord("m", 1.0, 64, 11, first_token=1.5, finish=2.5)
    later = module.seen_later(record, 0.25)
    assert (later.first_token, later.finish, later.tpot) == (1.75, 2.75, record.tpot)
    failed = RequestRecord("m", 1.0, 64, 11, error="refused")
    assert module.seen_later(failed, 0.25) == failed

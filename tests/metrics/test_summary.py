"""The figures against values worked out by hand, against numpy, and what must hold for any records."""

from __future__ import annotations

import json
import math
import os
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.metrics import Objectives, Reference, RequestRecord, percentile
from muxserve.metrics.report import read_json, write_json
from muxserve.metrics.summary import Summariser, summarise
from muxserve.metrics.tables import comparison

A1 = RequestRecord("a", 0.0, 100, 11, first_token=0.5, finish=2.5)  # TTFT 0.5, TPOT 0.2, latency 2.5
A2 = RequestRecord("a", 1.0, 50, 1, first_token=2.0, finish=2.0)  # TTFT 1, no TPOT, latency 1
B1 = RequestRecord("b", 2.0, 10, 5, first_token=2.25, finish=10.0, preemptions=2)  # latency 8
B2 = RequestRecord("b", 3.0, 10, 5, error="HTTP 500")
C1 = RequestRecord("c", 4.0, 10, 5, first_token=4.5)


def test_figures_by_hand() -> None:
    summary = summarise([A1, A2, B1, B2, C1])
    all_ = summary.overall
    assert (all_.requests, all_.completed, all_.failed, all_.unfinished, all_.preemptions) == (5, 3, 1, 1, 2)
    assert (all_.prompt_tokens, all_.output_tokens, all_.seconds) == (160, 17, 10.0)
    assert (all_.requests_per_second, all_.output_tokens_per_second, all_.total_tokens_per_second) == (0.3, 1.7, 17.7)
    assert all_.ttft is not None
    assert all_.tpot is not None
    assert all_.latency is not None
    assert (all_.ttft.count, all_.ttft.mean, all_.ttft.max) == (3, pytest.approx(1.75 / 3), 1.0)
    assert all_.tpot.count == 2
    assert all_.tpot.p50 == pytest.approx((0.2 + 7.75 / 4) / 2)
    assert all_.latency.p90 == pytest.approx(2.5 + 0.8 * 5.5)
    assert all_.latency_per_token is not None
    assert all_.latency_per_token.max == pytest.approx(8 / 5)
    assert summary.models["c"].latency is None
    assert summary.models["a"].requests_per_second == 0.2
    assert summary.errors == {"HTTP 500": 1}
    assert (all_.slo, all_.attainment, summary.slo_scales) == ({}, {}, [])


def test_both_weighted_throughputs_by_hand() -> None:
    summary = summarise([A1, A2, B1, B2, C1], rates={"a": 3.0, "b": 1.0, "c": 1.0, "idle": 5.0})
    assert summary.weighted_throughput == pytest.approx((3 * 0.2 + 1 * 0.1) / 10)
    # `a` was done after 2.5 s, `b` after 10 s.
    assert summary.weighted_throughput_own_span == pytest.approx((3 * 2 / 2.5 + 1 * 0.1) / 10)
    assert summary.models["idle"].requests == 0
    # Without rates the numbers of requests weigh.
    assert summarise([A1, A2, B1]).weighted_throughput == pytest.approx((2 * 0.2 + 1 * 0.1) / 3)
    with pytest.raises(ValueError, match="rates are missing for b, c"):
        summarise([A1, B1, C1], rates={"a": 1.0})


def test_attainment_counts_what_did_not_complete_as_missed() -> None:
    alone = {"a": Reference(1.25, 0.5, 0.2), "b": Reference(1.0, 0.25, 1.0), "c": Reference(1.0, 1.0, 1.0)}
    summary = summarise([A1, A2, B1, B2, C1], reference=lambda r: alone[r.model], slo_scales=(1, 2, 8))
    # Latency ratios: 2, 0.8, 8, inf, inf. TTFT and TPOT: 1, 2, 1.94, inf, inf.
    assert summary.overall.attainment == {"latency": [0.2, 0.4, 0.6], "ttft_tpot": [0.2, 0.6, 0.6]}
    assert summary.overall.scale_for_99 == {"latency": None, "ttft_tpot": None}
    assert summary.models["a"].attainment["latency"] == [0.5, 1.0, 1.0]
    assert summary.models["a"].scale_for_99 == {"latency": pytest.approx(2.0), "ttft_tpot": pytest.approx(2.0)}
    plain = summarise([A1, A2], reference=lambda r: 1.25, slo_scales=(1, 2))
    assert plain.overall.attainment == {"latency": [0.5, 1.0]}
    with pytest.raises(ValueError, match="must be positive"):
        summarise([A1], reference=lambda r: 0.0)


def test_objectives() -> None:
    assert Objectives().names == ()
    assert Objectives(ttft=1.0).met(1.0, None) == {"ttft": True, "all": True}
    assert Objectives.of_milliseconds(250, 200).met(0.25, 0.201) == {"ttft": True, "tpot": False, "all": False}
    summary = summarise([A1, A2, B1, B2], objectives={"a": Objectives(0.5, 0.3), "b": Objectives(tpot=2.0)})
    # `a`: the second is late; `b`: one is within, one failed. TTFT is asked of `a` only.
    assert summary.overall.slo == {"ttft": 0.5, "tpot": 0.75, "all": 0.5}
    assert summary.models["b"].slo == {"tpot": 0.5, "all": 0.5}


def test_the_span_can_be_given() -> None:
    late = RequestRecord("a", 5.0, 1, 2, 6.0, 7.0)
    assert summarise([late], start=5.0).overall.requests_per_second == 0.5
    assert summarise([late], end=10.0).overall.requests_per_second == 0.1
    with pytest.raises(ValueError, match="last event at 7"):
        summarise([late], end=6.0)


def test_nothing_and_only_failures() -> None:
    nothing = summarise([])
    assert (nothing.overall.requests, nothing.overall.requests_per_second, nothing.timeline) == (0, None, None)
    failures = summarise([B2], reference=lambda r: 1.0)
    assert (failures.overall.completed, failures.overall.requests_per_second) == (0, 0.0)
    assert set(failures.overall.attainment["latency"]) == {0.0}


def test_timeline_adds_up() -> None:
    records = [RequestRecord("a", i * 0.01, 1, 3, i * 0.01 + 0.5, i * 0.01 + 1.0) for i in range(1000)]
    summary = summarise(records)
    time = summary.timeline
    assert time is not None
    assert (sum(time.arrived), sum(time.completed), sum(time.output_tokens)) == (1000, 1000, 3000)
    assert time.step * len(time.completed) == pytest.approx(summary.overall.seconds)
    assert time.in_flight[-1] == 0
    # 100 arrive a second and stay for one.
    assert statistics.median(time.in_flight) == pytest.approx(100, abs=1)


def test_a_running_summary_changes_nothing() -> None:
    collected = Summariser()
    collected.add(A1)
    assert collected.summary().overall.requests == 1
    collected.add(B1)
    assert collected.summary() == summarise([A1, B1])


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0.001, 1e3), min_size=1, max_size=60), st.floats(0, 1))
def test_percentiles_are_numpys(values: list[float], share: float) -> None:
    assert percentile(values, share) == pytest.approx(float(np.quantile(values, share)))
    summary = summarise(RequestRecord("m", 0.0, 1, 2, v / 2, v) for v in values)
    latency = summary.overall.latency
    assert latency is not None
    assert [latency.p50, latency.p90, latency.p99] == pytest.approx([percentile(values, s) for s in (0.5, 0.9, 0.99)])
    curve = summary.curves["latency"]
    assert len(curve) == 101
    assert curve == sorted(curve)
    assert (curve[0], curve[100]) == pytest.approx((min(values), max(values)))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 50), st.floats(0.01, 9), st.booleans()), max_size=40))
def test_models_add_up_to_the_whole(rows: list[tuple[str, float, float, bool]]) -> None:
    records = [
        RequestRecord(
            m,
            arrival=at,
            prompt_tokens=3,
            output_tokens=4,
            first_token=at + d / 2,
            finish=at + d,
            error="" if good else "x",
        )
        if good
        else RequestRecord(m, at, 3, 4)
        for m, at, d, good in rows
    ]
    summary = summarise(records)
    for name in ("requests", "completed", "unfinished", "output_tokens", "requests_per_second"):
        parts = [getattr(of, name) or 0 for of in summary.models.values()]
        assert math.fsum(parts) == pytest.approx(getattr(summary.overall, name) or 0)


@pytest.mark.skipif("MUXSERVE_CHATLMSYS" not in os.environ, reason="MUXSERVE_CHATLMSYS names no file of measurements")
def test_own_spans_are_what_muxserves_measurements_hold() -> None:
    """Each model's published requests and throughput, put through the summary, give the published total."""
    document = json.loads(Path(os.environ["MUXSERVE_CHATLMSYS"]).read_text())
    for workload in document["workloads"].values():
        rates = {model["name"]: model["rate"] for model in workload["models"]}
        for measured in workload["measured"].values():
            records = []
            for name, of in measured["per_model"].items():
                last = of["requests"] / of["throughput"]
                records += [RequestRecord(name, 0.0, 1, 1, last, last) for _ in range(of["requests"])]
            summary = summarise(records, rates=rates)
            assert summary.weighted_throughput_own_span == pytest.approx(measured["throughput_weighted"], rel=0.003)


def test_a_run_that_took_no_time_has_no_rates(tmp_path: Path) -> None:
    for records in ([], [RequestRecord("a", 0.0, 8, 4, error="refused")], [RequestRecord("a", 0.0, 8, 4)]):
        summary = summarise(records, rates={"a": 1.0})
        assert summary.overall.requests_per_second is None
        assert summary.overall.output_tokens_per_second is None
        assert summary.overall.total_tokens_per_second is None
        assert summary.weighted_throughput is None
        assert summary.weighted_throughput_own_span is None
        assert ["requests/s", "-"] in comparison({"run": summary})
        write_json(tmp_path / "run.json", {"run": summary})
        assert read_json(tmp_path / "run.json").runs["run"] == summary

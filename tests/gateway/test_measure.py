from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from muxserve.gateway.http.http_request import HttpRequest
from muxserve.gateway.routing.requests import Tracked
from muxserve.gateway.status.measure import Measures, RequestOutcome
from tests.gateway.unit_specs import model
from tests.support.requests import asking


def ended(first: float | None, last: float | None, tokens: int) -> Tracked:
    request = Tracked("id", "front", asking("m", 1, 10), arrival=10.0, emitted=list(range(tokens)))
    request.first_token_at, request.last_token_at = first, last
    return request


def measures(**slo: float) -> tuple[Measures, CollectorRegistry]:
    registry = CollectorRegistry()
    return Measures([model("m", **slo)], registry), registry


def test_latencies() -> None:
    measured, registry = measures()
    measured.ended(ended(10.25, 11.25, 6), RequestOutcome.COMPLETED, 12.0)
    label = {"model_name": "m"}
    assert registry.get_sample_value("muxserve_time_to_first_token_seconds_sum", label) == 0.25
    assert registry.get_sample_value("muxserve_request_latency_seconds_sum", label) == 1.25
    assert registry.get_sample_value("muxserve_time_per_output_token_seconds_sum", label) == pytest.approx(0.2)


def test_one_token_has_no_time_per_token() -> None:
    measured, registry = measures()
    measured.ended(ended(10.25, 10.25, 1), RequestOutcome.COMPLETED, 12.0)
    label = {"model_name": "m"}
    assert registry.get_sample_value("muxserve_time_to_first_token_seconds_count", label) == 1
    assert registry.get_sample_value("muxserve_time_per_output_token_seconds_count", label) == 0


@pytest.mark.parametrize("outcome", [RequestOutcome.CANCELLED, RequestOutcome.FAILED, RequestOutcome.REFUSED])
def test_what_did_not_complete_counts_but_has_no_latency(outcome: RequestOutcome) -> None:
    measured, registry = measures(slo_ttft_ms=1.0)
    measured.ended(ended(10.25, 11.25, 6), outcome, 12.0)
    assert registry.get_sample_value("muxserve_requests_total", {"model_name": "m", "outcome": outcome.value}) == 1
    assert registry.get_sample_value("muxserve_request_latency_seconds_count", {"model_name": "m"}) == 0
    missed = {"model_name": "m", "slo": "ttft", "met": "false"}
    assert registry.get_sample_value("muxserve_slo_requests_total", missed) == 0


@pytest.mark.parametrize(
    ("ttft_ms", "tpot_ms", "ttft", "tpot", "both"),
    [
        (250.0, 200.0, "true", "true", "true"),
        (249.0, 201.0, "false", "true", "false"),
        (300.0, 100.0, "true", "false", "false"),
    ],
)
def test_slo_attainment(ttft_ms: float, tpot_ms: float, ttft: str, tpot: str, both: str) -> None:
    measured, registry = measures(slo_ttft_ms=ttft_ms, slo_tpot_ms=tpot_ms)
    measured.ended(ended(10.25, 11.25, 6), RequestOutcome.COMPLETED, 12.0)
    for slo, met in (("ttft", ttft), ("tpot", tpot), ("all", both)):
        label = {"model_name": "m", "slo": slo, "met": met}
        assert registry.get_sample_value("muxserve_slo_requests_total", label) == 1


def test_models_without_objectives_have_no_attainment() -> None:
    measured, registry = measures()
    measured.ended(ended(10.25, 11.25, 6), RequestOutcome.COMPLETED, 12.0)
    assert not [s for family in registry.collect() for s in family.samples if s.name == "muxserve_slo_requests_total"]


def test_a_cancel_is_a_stop_string_unless_the_client_left() -> None:
    request = ended(10.25, 11.25, 6)
    request.context = HttpRequest(10.0)
    assert RequestOutcome.of_cancel(request) is RequestOutcome.COMPLETED
    request.context.disconnected = True
    assert RequestOutcome.of_cancel(request) is RequestOutcome.CANCELLED


def test_nothing_is_shown_of_a_model_that_was_removed() -> None:
    measured, registry = measures(slo_ttft_ms=1.0)
    measured.ended(ended(10.25, 11.25, 6), RequestOutcome.COMPLETED, 12.0)
    measured.moved("m", "u0", "u1")
    measured.rejected("m", "queue")
    measured.add(model("other"))
    measured.remove("m")
    left = {sample.labels["model_name"] for metric in registry.collect() for sample in metric.samples}
    assert left == {"other"}
    assert measured.models == {"other"}

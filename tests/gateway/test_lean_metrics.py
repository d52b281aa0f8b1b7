"""What `/metrics` leaves out of vLLM's series, and what it keeps."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from muxserve.gateway.vllm_metrics import Lean

BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)


def lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(Lean(registry)).decode().splitlines() if not line.startswith("#")]  # type: ignore[arg-type]


def test_empty_and_constant_series_are_left_out_and_buckets_are_fewer() -> None:
    registry = CollectorRegistry()
    labels = ["model_name", "engine"]
    ttft = Histogram("vllm:time_to_first_token_seconds", "x", labels, buckets=BUCKETS, registry=registry)
    ttft.labels("m", "0").observe(3.0)
    ttft.labels("m", "1")
    Gauge("vllm:engine_sleep_state", "x", [*labels, "sleep_state"], registry=registry).labels("m", "0", "awake").set(1)
    source = Counter("vllm:prompt_tokens_by_source", "x", [*labels, "source"], registry=registry)
    source.labels("m", "0", "local_compute").inc(7)
    source.labels("m", "0", "external")
    Counter("vllm:num_preemptions", "x", labels, registry=registry).labels("m", "0")
    shown = [line for line in lines(registry) if "_created" not in line]
    at = 'engine="0",model_name="m"'
    assert shown == [
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="2.0",model_name="m"} 0.0',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="10.0",model_name="m"} 1.0',
        'vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 1.0',
        f"vllm:time_to_first_token_seconds_count{{{at}}} 1.0",
        f"vllm:time_to_first_token_seconds_sum{{{at}}} 3.0",
        f'vllm:prompt_tokens_by_source_total{{{at},source="local_compute"}} 7.0',
        f"vllm:num_preemptions_total{{{at}}} 0.0",
    ]


def test_the_fleets_own_series_are_all_there() -> None:
    registry = CollectorRegistry()
    own = Histogram("muxserve_time_to_first_token_seconds", "x", ["model_name"], buckets=BUCKETS, registry=registry)
    own.labels("m")
    assert len([line for line in lines(registry) if "_bucket" in line]) == len(BUCKETS) + 1

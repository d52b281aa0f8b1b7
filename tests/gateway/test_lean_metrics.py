"""What `/metrics` leaves out of vLLM's series, and what it keeps."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from muxserve.gateway.status.vllm_metrics import Lean

BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0)


def lines(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(Lean(registry)).decode().splitlines() if not line.startswith("#")]  # type: ignore[arg-type]


def test_one_series_per_model_none_empty_or_constant_and_half_of_the_buckets() -> None:
    registry = CollectorRegistry()
    labels = ["model_name", "engine"]
    ttft = Histogram("vllm:time_to_first_token_seconds", "x", labels, buckets=BUCKETS, registry=registry)
    ttft.labels("m", "0").observe(3.0)
    ttft.labels("m", "1")
    ttft.labels("idle", "0")
    usage = Gauge("vllm:kv_cache_usage_perc", "x", labels, registry=registry)
    usage.labels("m", "0").set(0.5)
    usage.labels("m", "1").set(0.25)
    Histogram("vllm:iteration_tokens_total", "x", labels, buckets=BUCKETS, registry=registry).labels("m", "0").observe(
        1
    )
    Gauge("vllm:engine_sleep_state", "x", [*labels, "sleep_state"], registry=registry).labels("m", "0", "awake").set(1)
    source = Counter("vllm:prompt_tokens_by_source", "x", [*labels, "source"], registry=registry)
    source.labels("m", "0", "local_compute").inc(7)
    source.labels("m", "1", "local_compute").inc(2)
    source.labels("m", "0", "external")
    Counter("vllm:num_preemptions", "x", labels, registry=registry).labels("m", "0")
    shown = [line for line in lines(registry) if "_created" not in line]
    assert shown == [
        'vllm:time_to_first_token_seconds_bucket{le="2.0",model_name="m"} 0.0',
        'vllm:time_to_first_token_seconds_bucket{le="10.0",model_name="m"} 1.0',
        'vllm:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 1.0',
        'vllm:time_to_first_token_seconds_count{model_name="m"} 1.0',
        'vllm:time_to_first_token_seconds_sum{model_name="m"} 3.0',
        'vllm:kv_cache_usage_perc{model_name="m"} 0.5',
        'vllm:prompt_tokens_by_source_total{model_name="m",source="local_compute"} 9.0',
        'vllm:num_preemptions_total{model_name="m"} 0.0',
    ]


def test_the_fleets_own_series_are_all_there() -> None:
    registry = CollectorRegistry()
    own = Histogram("muxserve_time_to_first_token_seconds", "x", ["model_name"], buckets=BUCKETS, registry=registry)
    own.labels("m")
    assert len([line for line in lines(registry) if "_bucket" in line]) == len(BUCKETS) + 1

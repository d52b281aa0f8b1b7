"""Numbers, names and files far beyond what anybody means are refused in words, before anything is done with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from muxserve.config import FleetError, parse_fleet
from muxserve.config.problems import MOST_PROBLEMS

NINES = "9" * 400_000
HEX = "0x" + "F" * 5000
ONE = "models:\n  - name: one\n    hub: org/one\n"


def problems(text: str, serving: bool = True) -> list[str]:
    with pytest.raises(FleetError) as caught:
        parse_fleet(text, "fleet.yaml", Path("/"), {}, serving=serving)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"kv_pool: {{size: {NINES}GiB}}\n{ONE}", "fleet.yaml:1: kv_pool.size: must be at most 1 EiB, not '9999"),
        (f"kv_pool: {{size: {HEX}}}\n{ONE}", "kv_pool.size: must be at most 1 EiB, not a number of very many digits"),
        (f"gateway: {{drain_seconds: {NINES}h}}\n{ONE}", "gateway.drain_seconds: must be at most a thousand years"),
        (f"gateway: {{drain_seconds: {HEX}}}\n{ONE}", "gateway.drain_seconds: must be at most a thousand years"),
        (f"cluster: {{network: {NINES}Gb/s}}\n{ONE}", "cluster.network: must be larger than zero, not '9999"),
        (f"cluster: {{cores: {HEX}}}\n{ONE}", "cluster.cores: must be at most 4,096, or auto, not a number of very"),
        (f"cluster: {{gpus: {HEX}}}\n{ONE}", "cluster.gpus: must be at most 16384, not a number of very many digits"),
        (f"cluster: {{gpus: 1000000000}}\n{ONE}", "cluster.gpus: must be at most 16384, not 1000000000"),
        (f"priorities: {{normal: {{rank: {HEX}}}}}\n{ONE}", "priorities.normal.rank: must be at most 1000"),
        (f"{ONE}    replicas: 100000\n", "fleet.yaml:4: models[0].replicas: must be at most 1,024, not 100000"),
        (f"{ONE}    replicas: {HEX}\n", "models[0].replicas: must be at most 1,024, not a number of very many digits"),
        (f"{ONE}    replicas: {{max: 65}}\n", "models[0].replicas.max: 65 can be planned, but not served; a fleet has"),
        (f"{ONE}    rate: {HEX}\n", "models[0].rate: must be a number, not a number of very many digits"),
        (f"{ONE}    max_len: 1\n", "models[0].max_len: must be a whole number of at least 2, or auto, not 1"),
        (f"{ONE}    max_num_seqs: 1000000000\n", "max_num_seqs: must be at most 65,536, or auto, not 1000000"),
        (f"{ONE}    workload: {{prompt_tokens: {HEX}}}\n", "prompt_tokens: must be at most 1e+09, not a number"),
        (f"{ONE}    ? {'k' * 400_000}\n    : 1\n", "unknown key"),
        (f"policy: {'x' * 400_000}\n{ONE}", "policy: must be one of adbs, slack, free, fcfs, not 'xxxx"),
        ("a: " + "[" * 100_000, "fleet.yaml:1: the file is nested too deeply"),
        ("a: " + "{b: " * 1000 + "1" + "}" * 1000, "fleet.yaml:1: the file is nested too deeply"),
    ],
    ids=lambda value: value[:40],
)
def test_what_is_far_too_much(text: str, expected: str) -> None:
    said = problems(text)
    assert any(expected in each for each in said)
    assert all(len(each) < 500_000 for each in said)


def test_many_models_are_refused_as_one_mistake() -> None:
    models = "".join(f"  - {{name: m{number}, hub: org/m}}\n" for number in range(1001))
    assert problems(f"models:\n{models}") == ["fleet.yaml:1: models: has 1,001 entries, and may have 1,000"]


def test_many_mistakes_are_counted() -> None:
    said = problems("".join(f"key{number}: 1\n" for number in range(5000)) + ONE)
    assert len(said) == MOST_PROBLEMS + 1
    assert said[0].startswith("fleet.yaml:1: key0: unknown key")
    assert said[-1] == "fleet.yaml: 4,900 mistakes more"


def test_a_file_of_very_many_keys_is_not_read_to_its_end() -> None:
    said = problems("".join(f"key{number}: 1\n" for number in range(60_000)))
    assert said == ["fleet.yaml:10000: the file has more than 20,000 keys and values"]


def test_more_replicas_can_be_planned_than_served() -> None:
    fleet = parse_fleet(f"{ONE}    replicas: 65\n", "fleet.yaml", Path("/"), {}, serving=False)
    assert fleet.models[0].replicas.max == 65

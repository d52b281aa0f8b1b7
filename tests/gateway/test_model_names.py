"""Which of several models serves a request for a name that they share."""

from __future__ import annotations

from collections import Counter

import pytest

from muxserve.gateway.routing.model_names import ModelNames, pick
from muxserve.spec import FleetSpec, GatewaySpec
from tests.gateway.unit_specs import model

KEYS = [f"request-{number}" for number in range(10_000)]


@pytest.mark.parametrize("weights", [{"v1": 90, "v2": 10}, {"v1": 1.0, "v2": 1.0, "v3": 2.0}, {"only": 3}])
def test_each_model_gets_its_part_of_the_requests(weights: dict[str, float]) -> None:
    counts = Counter(pick(weights, key) for key in KEYS)
    for name, weight in weights.items():
        # Five standard deviations of a binomial distribution.
        part = weight / sum(weights.values())
        assert abs(counts[name] - part * len(KEYS)) <= 5 * (part * (1 - part) * len(KEYS)) ** 0.5


def test_a_request_stays_where_it_is_when_a_new_version_gets_less() -> None:
    """The same request goes to the same model, in every gateway; with less for the last one the first keeps its own."""
    more, less = {"v1": 80, "v2": 20}, {"v1": 95, "v2": 5}
    for key in KEYS:
        assert pick(more, key) == pick(dict(more), key)
        assert pick(more, key) == "v2" or pick(less, key) == "v1"


def test_who_cannot_serve_gets_no_part() -> None:
    names = ModelNames({}, {"chat": {"v1": 90, "v2": 10, "v3": 0}})
    assert {names.choose("chat", key, {"v2", "v3"}) for key in KEYS[:100]} == {"v2"}
    assert names.choose("chat", "key", {"v3"}) is None


def test_names_of_a_fleet_whatever_versions_it_has() -> None:
    models = [model("m", aliases=("org/m",)), model("m@2", aliases=("org/m",), adapters={"poet": "/p"}), model("n")]
    fleet = FleetSpec(
        "", GatewaySpec("127.0.0.1", 0), models, [], versions={"m": ""}, aliases={"chat": {"m": 1, "n": 2}}
    )
    assert ModelNames.of(fleet).models == {
        "m": {"m"}, "org/m": {"m"}, "poet": {"m"}, "n": {"n"}, "chat": {"m", "n"},
    }  # fmt: skip

"""Dashboards and alert rules are what Grafana and Prometheus take; their queries meet a fleet in `tests/e2e`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.promql import DASHBOARDS, Exposed, panels, parser, rules

TEXT = """# TYPE a_total counter
a_total{model_name="m",outcome="completed"} 1
# TYPE b histogram
b_bucket{le="1.0",model_name="m"} 1
b_count{model_name="m"} 1
b_sum{model_name="m"} 1
# TYPE quiet gauge
"""


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_lays_out_its_panels(dashboard: Path) -> None:
    document = json.loads(dashboard.read_text())
    assert document["uid"] == f"muxserve-{dashboard.stem}"
    ids = [panel["id"] for panel in document["panels"]]
    assert len(ids) == len(set(ids))
    taken: set[tuple[int, int]] = set()
    for panel in document["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
    for panel in panels(dashboard):
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFG")[: len(panel["targets"])]
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_alert_rules_say_what_is_wrong_and_how_bad() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) >= 5
    for rule in rules():
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_what_a_query_misses_is_found() -> None:
    promql, exposed = parser(), Exposed(TEXT)

    def wrong(query: str, used: str = "") -> list[str]:
        return exposed.missing(promql, query, used)

    rate = 'sum by (model_name) (rate(a_total{outcome="completed"}[$__rate_interval]))'
    assert not wrong(f"{rate} / {rate} > 0.1", "{{model_name}} {{ $labels.model_name }}")
    assert not wrong("histogram_quantile(0.9, sum by (le, model_name) (rate(b_bucket[5m])))", "{{model_name}}")
    assert not wrong('count(quiet{unit="u0"} > 0) or vector(0)')
    assert wrong(rate, "{{outcome}}") == ["the result has no label outcome"]
    assert wrong("rate(c_total[5m])") == ["no metric c_total"]
    assert wrong("sum by (unit) (a_total)") == ["no label unit"]
    assert wrong('a_total{phase="decode"}') == ["a_total has no label phase"]
    assert wrong('a_total{outcome="done"}') == ["a_total: no outcome=done, only ['completed']"]
    assert wrong("histogram_quantile(0.9, sum by (le) (rate(b_bucket[5m])))", "{{le}}") == [
        "the result has no label le"
    ]
    with pytest.raises(ValueError, match="parenthesis"):
        wrong("sum by (a_total")

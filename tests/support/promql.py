"""Queries of dashboards and alert rules, against what a fleet really exposes."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
TOOLS = DEPLOY.parent / "build" / "shipping"
# Series of fleets in which memory decides who is awake.
OF_RESIDENCY = ("muxserve_memory_", "muxserve_model_residence", "muxserve_model_wake", "muxserve_model_evictions")
DASHBOARDS = sorted((DEPLOY / "grafana").glob("*.json"))
ALERTS = DEPLOY / "prometheus" / "alerts.yaml"


def parser() -> Any:
    """The library that reads PromQL; skips the test where it is not installed."""
    if str(TOOLS) not in sys.path:
        sys.path.append(str(TOOLS))
    return pytest.importorskip("promql_parser", reason="no tools: make test installs them into build/shipping")


def rules() -> list[dict[str, Any]]:
    """The alert rules."""
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


def panels(dashboard: Path) -> list[dict[str, Any]]:
    """The panels of a dashboard that show something."""
    return [panel for panel in json.loads(dashboard.read_text())["panels"] if panel["type"] != "row"]


def queries() -> Iterator[tuple[str, str, str]]:
    """Where each query stands, the query, and what uses labels of its result."""
    for dashboard in DASHBOARDS:
        for panel in panels(dashboard):
            for target in panel["targets"]:
                yield f"{dashboard.name}: {panel['title']}", target["expr"], target["legendFormat"]
        for variable in json.loads(dashboard.read_text())["templating"]["list"]:
            if variable["type"] == "query":
                metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
                yield f"{dashboard.name}: ${variable['name']}", f"max by ({label}) ({metric})", ""
    for rule in rules():
        yield f"{ALERTS.name}: {rule['alert']}", rule["expr"], " ".join(rule["annotations"].values())


class Exposed:
    """The series of a Prometheus text: of each name the values of its labels. Of names that are announced and have no
    series at the moment (`muxserve_suspect`), labels are not known."""

    def __init__(self, text: str) -> None:
        self.labels: dict[str, dict[str, set[str]]] = {}
        self.empty = set()
        for family in text_string_to_metric_families(text):
            if not family.samples:
                self.empty.add(family.name)
            for sample in family.samples:
                known = self.labels.setdefault(sample.name, {})
                for label, value in sample.labels.items():
                    known.setdefault(label, set()).add(value)

    def missing(self, promql: Any, expression: str, used: str) -> list[str]:
        """What `expression` asks for that is not there, and the labels in `used` that its result has not."""
        for variable, value in (("$__rate_interval", "5m"), ("$model", ".*"), ("$unit", ".*")):
            expression = expression.replace(variable, value)
        nodes: list[Any] = []
        tree = promql.parse(expression)
        promql.walk(tree, nodes.append)
        selectors = [node for node in nodes if isinstance(node, promql.VectorSelector)]
        wrong = [f"no metric {node.name}" for node in selectors if node.name not in {*self.labels, *self.empty}]
        if wrong or any(node.name in self.empty for node in selectors):
            return wrong
        # Prometheus itself says of each series which instance had it.
        there = {"instance", *(name for node in selectors for name in self.labels[node.name])}
        for node in nodes:
            if isinstance(node, promql.VectorSelector):
                wrong += self._unmatched(promql, node)
            elif isinstance(node, promql.AggregateExpr) and node.modifier is not None:
                wrong += [f"no label {label}" for label in node.modifier.labels if label not in there]
        kept = _labels_of(promql, tree, self.labels)
        shown = re.findall(r"\$labels\.(\w+)", used) or re.findall(r"{{(\w+)}}", used)
        return wrong + [f"the result has no label {label}" for label in shown if label not in kept]

    def _unmatched(self, promql: Any, selector: Any) -> list[str]:
        known = self.labels[selector.name]
        wrong = []
        for matcher in selector.matchers.matchers:
            if matcher.name not in known:
                wrong.append(f"{selector.name} has no label {matcher.name}")
            elif matcher.op == promql.MatchOp.Equal and matcher.value not in known[matcher.name]:
                wrong.append(f"{selector.name}: no {matcher.name}={matcher.value}, only {sorted(known[matcher.name])}")
        return wrong


def _labels_of(promql: Any, node: Any, known: Mapping[str, Mapping[str, set[str]]]) -> set[str]:
    """The labels of the result of `node`."""
    if isinstance(node, promql.VectorSelector):
        return {*known[node.name]}
    if isinstance(node, promql.MatrixSelector):
        return {*known[node.vector_selector.name]}
    if isinstance(node, promql.AggregateExpr):
        return {*node.modifier.labels} if node.modifier is not None else set()
    if isinstance(node, promql.BinaryExpr):
        return _labels_of(promql, node.lhs, known)
    if isinstance(node, promql.ParenExpr):
        return _labels_of(promql, node.expr, known)
    if isinstance(node, promql.Call):
        kept = set().union(*(_labels_of(promql, each, known) for each in node.args))
        return kept - {"le"} if node.func.name == "histogram_quantile" else kept
    return set()


def unanswered(text: str, residency: bool) -> list[str]:
    """The queries that find nothing in a fleet's metrics: those about residency, or all others."""
    promql, exposed = parser(), Exposed(text)
    asked = [query for query in queries() if any(each in query[1] for each in OF_RESIDENCY) == residency]
    assert asked
    found = {f"{place}: {query}": exposed.missing(promql, query, used) for place, query, used in asked}
    return [f"{place}: {', '.join(wrong)}" for place, wrong in found.items() if wrong]

"""The report file and the page: what is written is read, and the page needs nothing from elsewhere."""

from __future__ import annotations

import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from muxserve.metrics import Objectives, Reference, RequestRecord
from muxserve.metrics.html_report import report_page
from muxserve.metrics.page import write_page
from muxserve.metrics.report import ReportError, read_json, to_json, write_json
from muxserve.metrics.summary import Summary, summarise
from muxserve.metrics.tables import comparison_table, models_table, seconds_words


def run(seed: int) -> Summary:
    rng = random.Random(seed)
    records = []
    for i in range(200):
        at, ttft, tokens = i * 0.1, rng.expovariate(5), rng.randint(1, 50)
        records.append(RequestRecord(rng.choice(["<a>", "b[/b]"]), at, 9, tokens, at + ttft, at + ttft + tokens * 0.01))
    records.append(RequestRecord("<a>", 1.0, 1, 1, error="<HTTP 500>"))
    return summarise(
        records,
        reference=lambda r: Reference(0.2, 0.1, 0.01),
        objectives={"<a>": Objectives(ttft=0.2)},
        extra={"gpu_seconds": 12.5, "pages": [1, 2]},
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    runs = {"one": run(1), "two": run(2)}
    write_json(tmp_path / "r.json", runs, about="x", parameters={"speed": 2})
    report = read_json(tmp_path / "r.json")
    assert report.runs == runs
    assert (report.about, report.parameters) == ("x", {"speed": 2})


def test_the_documented_fields_are_there() -> None:
    """docs/metrics.md names every field; a field that goes or is renamed breaks somebody's script."""
    document = json.loads(to_json({"one": run(1)}))
    page = (Path(__file__).resolve().parents[2] / "docs" / "metrics.md").read_text()

    def fields(value: object) -> set[str]:
        found = set()
        if isinstance(value, dict):
            for key, inner in value.items():
                if key in ("runs", "models", "rates", "errors", "extra", "parameters"):
                    inner = list(inner.values()) if key in ("runs", "models") else None
                    found |= {key} | (fields(inner[0]) if inner else set())
                else:
                    found |= {key} | fields(inner)
        return found

    missing = {name for name in fields(document) if f"`{name}`" not in page}
    assert not missing


@pytest.mark.parametrize(
    ("text", "says"), [("{}", "not a MuxServe report"), ("nonsense", "not a MuxServe report"), ("v2", "version 2")]
)
def test_other_files_are_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(msgspec.json.encode({"muxserve_report": 2, "runs": {}}) if text == "v2" else text.encode())
    with pytest.raises(ReportError, match=says):
        read_json(path)


class Page(HTMLParser):
    """Collects what the page would load, and its text outside scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text = ""
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            del self.open[len(self.open) - 1 - self.open[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        if "script" not in self.open and "style" not in self.open:
            self.text += data


def test_the_page_is_self_contained_and_escaped(tmp_path: Path) -> None:
    made = report_page({"one": run(1), "two & more": run(2)}, title="T<i>", about="about it")
    write_page(tmp_path / "r.html", made)
    source = (tmp_path / "r.html").read_text()
    page = Page()
    page.feed(source)
    assert page.loads == []
    assert source.count("Plotly.newPlot(") >= 9
    for words in (
        "T<i>",
        "two & more",
        "<a>",
        "<HTTP 500>",
        "weighted requests/s",
        "SLO attainment",
        "Requests under way",
    ):
        assert words in page.text
    # The library itself is in the page, once.
    assert len(re.findall(r"plotly\.js v\d", source)) == 1


def test_an_empty_run_makes_a_page(tmp_path: Path) -> None:
    write_page(tmp_path / "r.html", report_page({"none": summarise([])}))
    assert "requests" in (tmp_path / "r.html").read_text()


def test_tables() -> None:
    console = Console(width=240, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(comparison_table({"one": run(1), "[two]": run(2)}))
    console.print(models_table(run(1)))
    text = console.export_text()
    for words in (
        "[two]",
        "b[/b]",
        "<a>",
        "TTFT p99",
        "latency within 8 x alone",
        "SLO ttft met",
        "gpu seconds",
        "12.5",
    ):
        assert words in text
    assert "preemptions" not in text
    console.print(comparison_table({"none": summarise([])}))


@pytest.mark.parametrize(
    ("value", "words"), [(None, "-"), (0.0123, "12.3 ms"), (1.234, "1.23 s"), (250.4, "250 s"), (0.0, "0 ms")]
)
def test_seconds_in_words(value: float | None, words: str) -> None:
    assert seconds_words(value) == words

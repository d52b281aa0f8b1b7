"""The trace format: round trips, the line numbers of what is wrong, and the trace that the repository ships."""

from __future__ import annotations

import gzip
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muxserve.workload import (
    FixedLength,
    LogNormalLengths,
    ModelLoad,
    TraceError,
    TraceRequest,
    generate,
    open_trace,
    open_workload,
    read_trace,
    write_trace,
)

ROOT = Path(__file__).resolve().parents[2]
HEADER = '{"muxserve_trace":1,"models":["a","b"],"duration":10.0}'

requests = st.lists(
    st.tuples(st.floats(0, 1e6, allow_nan=False), st.sampled_from(["a", "ü/b c"]), st.integers(1, 9999)), max_size=30
).map(lambda rows: [TraceRequest(t, m, n, n + 1) for t, m, n in sorted(rows)])


@settings(deadline=None)
@given(requests=requests, compressed=st.booleans())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, requests: list[TraceRequest], compressed: bool) -> None:
    path = tmp_path_factory.mktemp("trace") / ("t.jsonl.gz" if compressed else "t.jsonl")
    count = write_trace(path, ["a", "ü/b c"], requests, duration=2.5, about="x", seed=3, parameters={"alpha": 0.9})
    trace = read_trace(path)
    assert count == len(requests)
    assert trace.requests == requests
    assert (trace.header.duration, trace.header.about, trace.header.seed) == (2.5, "x", 3)
    assert trace.header.parameters == {"alpha": 0.9}


def test_equal_traces_are_equal_files(tmp_path: Path) -> None:
    loads = {"a": ModelLoad(5.0, FixedLength(3), LogNormalLengths(8, 0.5, 1, 20))}
    for name in ("x.jsonl.gz", "y.jsonl.gz"):
        write_trace(tmp_path / name, ["a"], generate(loads, 20.0, 1))
    assert (tmp_path / "x.jsonl.gz").read_bytes() == (tmp_path / "y.jsonl.gz").read_bytes()


@pytest.mark.parametrize(
    ("lines", "line", "says"),
    [
        ([], 1, "empty"),
        (["not json"], 1, "not the header"),
        (['{"models":["a"]}'], 1, "muxserve_trace"),
        (['{"muxserve_trace":2,"models":["a"]}'], 1, "version 2"),
        (['{"muxserve_trace":1,"models":[]}'], 1, "at least one model"),
        (['{"muxserve_trace":1,"models":["a"],"modles":[]}'], 1, "modles"),
        (['{"muxserve_trace":1,"models":["a"],"duration":-1}'], 1, "duration"),
        ([HEADER, '[0.5,"a",3,4]', '[0.6,"a",3'], 3, "not a request"),
        ([HEADER, '[0.5,"a",3,4,5]'], 2, "not a request"),
        ([HEADER, '["0.5","a",3,4]'], 2, "not a request"),
        ([HEADER, '{"arrival":0.5}'], 2, "not a request"),
        ([HEADER, '[0.5,"a",3.5,4]'], 2, "not a request"),
        ([HEADER, '[0.5,"a",3,4]', "", '[0.4,"a",3,4]'], 4, "before the one above"),
        ([HEADER, '[0.5,"c",3,4]'], 2, "'c' is not among"),
        ([HEADER, '[0.5,"a",0,4]'], 2, "at least 1 token"),
        ([HEADER, '[-0.5,"a",1,4]'], 2, "zero or positive"),
        ([HEADER, '[0.5,"\xff",1,4]'], 2, "not a request"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, lines: list[str], line: int, says: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(f"{text}\n" for text in lines), encoding="latin-1")
    with pytest.raises(TraceError, match=says) as caught:
        read_trace(path)
    assert caught.value.line == line
    assert f"bad.jsonl, line {line}: " in str(caught.value)


def test_malformed_lines_can_be_skipped(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f'{HEADER}\n[0.5,"a",3,4]\nrubbish\n[0.4,"a",1,1]\n[0.6,"b",1,1]\n')
    told: list[int] = []
    with open_trace(path, lambda error: told.append(error.line)) as (_, stream):
        assert [request.arrival for request in stream] == [0.5, 0.6]
    assert told == [3, 4]


def test_what_precedes_a_malformed_line_is_streamed(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(f'{HEADER}\n[0.5,"a",3,4]\n[0.6,"b",1,1]\nrubbish\n')
    with open_trace(path) as (header, stream):
        assert header.models == ["a", "b"]
        assert next(stream) == TraceRequest(0.5, "a", 3, 4)
        assert next(stream) == TraceRequest(0.6, "b", 1, 1)
        with pytest.raises(TraceError, match="line 4"):
            next(stream)


@pytest.mark.parametrize("damage", ["cut off", "not gzip", "zeros inside"])
def test_a_damaged_gzip_file_is_a_trace_error(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "t.jsonl.gz"
    rows = "".join(f'[{i},"a",{i * 7 % 97 + 1},{i * 31 % 89 + 1}]\n' for i in range(200))
    data = gzip.compress(f"{HEADER}\n{rows}".encode())
    damaged = {
        "cut off": data[:-20],
        "not gzip": b"not gzip at all",
        "zeros inside": data[:60] + bytes(40) + data[100:],
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(TraceError, match=r"damaged|not the header|not a request"):
        read_trace(path)


def test_reading_takes_constant_memory(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    write_trace(path, ["a"], (TraceRequest(i / 10, "a", 5, 6) for i in range(50_000)))
    tracemalloc.start()
    with open_trace(path) as (_, stream):
        count = sum(1 for _ in stream)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 50_000
    assert peak < path.stat().st_size / 4


def test_the_writer_refuses_what_the_reader_would(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="at least one model"):
        write_trace(tmp_path / "t.jsonl", [], [])
    first = TraceRequest(1.0, "a", 1, 1)
    for second, says in (
        (TraceRequest(0.5, "a", 1, 1), r"line 3: the arrival 0\.5"),
        (TraceRequest(1.5, "b", 1, 1), "'b' is"),
    ):
        with pytest.raises(TraceError, match=says):
            write_trace(tmp_path / "t.jsonl", ["a"], [first, second])
    assert write_trace(tmp_path / "t.jsonl", ["a"], [first]) == 1


@pytest.mark.parametrize("path", sorted((ROOT / "traces").glob("*.jsonl*")), ids=lambda path: path.name)
def test_shipped_traces_are_what_their_headers_say(path: Path) -> None:
    trace = read_trace(path)
    again = open_workload(str(trace.header.parameters["workload"]), trace.header.models)
    assert list(again) == trace.requests
    assert (again.seed, again.duration) == (trace.header.seed, trace.header.duration)
    assert str(trace.header.parameters["workload"]) in (path.parent / "README.md").read_text()

"""Every public format: what it holds, how it is recognised, and what is said about a malformed place in it."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from muxserve.workload import TraceError, WorkloadError, describe, open_workload, read_trace
from muxserve.workload.readers import detect
from muxserve.workload.text import estimated_tokens, tokenizer_counter
from tests.workload import files

ROOT = Path(__file__).resolve().parents[2]


def rows(path: Path, **options: object) -> list[tuple[float, str, int, int]]:
    workload = open_workload(files.with_keys(path, **options))
    return [(round(r.arrival, 3), r.model, r.prompt_tokens, r.output_tokens) for r in workload]


@pytest.mark.parametrize(
    ("name", "content", "format", "expected"),
    [
        (
            "azure.csv",
            files.AZURE_2023,
            "azure",
            [(0.0, "model", 374, 44), (4.315, "model", 396, 109), (4.542, "model", 879, 55)],
        ),
        (
            "azure.csv.gz",
            files.AZURE_2024,
            "azure",
            [(0.0, "model", 2162, 5), (0.007, "model", 2399, 6), (1.0, "model", 76, 15)],
        ),
        (
            "burst.csv",
            files.BURSTGPT,
            "burstgpt",
            [(0.0, "ChatGPT", 472, 18), (40.0, "ChatGPT", 1087, 230), (113.0, "GPT-4", 417, 276)],
        ),
        ("m.jsonl", files.MOONCAKE, "mooncake", [(0.0, "model", 955, 52), (3.053, "model", 472, 26)]),
        ("l.json", files.LMSYS, "lmsys", [(0.0, "vicuna-13b", 4, 8), (10.0, "koala-13b", 7, 9)]),
        (
            "l.jsonl",
            "\n".join(map(json.dumps, files.LMSYS)),
            "lmsys",
            [(0.0, "vicuna-13b", 4, 8), (10.0, "koala-13b", 7, 9)],
        ),
    ],
)
def test_formats_with_times(tmp_path: Path, name: str, content: object, format: str, expected: list[object]) -> None:
    path = files.write(tmp_path / name, content)  # type: ignore[arg-type]
    assert detect(path) == format
    assert rows(path) == expected


def test_sharegpt_has_no_times(tmp_path: Path) -> None:
    path = files.write(tmp_path / "s.json", files.SHAREGPT)  # type: ignore[arg-type]
    assert detect(path) == "sharegpt"
    with pytest.raises(WorkloadError, match="does not tell when its requests came; give a rate"):
        rows(path)
    first = rows(path, rate=2.0, seed=3)
    assert [row[2:] for row in first] == [(4, 8), (4, 3)]
    assert 0 < first[0][0] < first[1][0]
    assert first == rows(path, rate=2.0, seed=3) != rows(path, rate=2.0, seed=4)
    # Later prompts hold all that was said before them.
    assert [row[2:] for row in rows(path, rate=2.0, all_turns=True)] == [(4, 8), (4 + 8 + 2, 4), (4, 3)]


def test_failed_requests_are_left_out_and_counted(tmp_path: Path) -> None:
    workload = open_workload(files.write(tmp_path / "b.csv", files.BURSTGPT))
    assert len(list(workload)) == 3
    assert sum(workload.left_out.dropped.values()) == 1
    assert workload.models == ("ChatGPT", "GPT-4")


@pytest.mark.parametrize(
    ("name", "content", "place", "says"),
    [
        ("a.csv", files.AZURE_2023 + "yesterday,1,2\n", "line 5", "TIMESTAMP must be a date and time, not 'yesterday'"),
        ("a.csv", files.AZURE_2023 + "2023-11-16 18:16:00,1\n", "line 5", "2 fields instead of 3"),
        ("a.csv", files.AZURE_2023 + "2023-11-16 18:16:00,x,2\n", "line 5", "ContextTokens must be a whole number"),
        ("b.csv", files.BURSTGPT + "\nnan,m,1,2,3,c\n", "line 7", "Timestamp must be a number"),
        ("b.csv", files.BURSTGPT + "200,m,1,-2,3,c\n", "line 6", "Response tokens must not be negative"),
        ("m.jsonl", files.MOONCAKE + '{"timestamp": 1}\n', "line 3", "input_length"),
        ("m.jsonl", files.MOONCAKE + "nonsense\n", "line 3", "not a request"),
        ("m.jsonl", files.MOONCAKE + '{"timestamp":1,"input_length":-1,"output_length":1}\n', "line 3", "negative"),
        ("l.json", [*files.LMSYS, 7], "record 3", "not an object"),
        ("l.json", [*files.LMSYS, {"conversation": 3}], "record 3", "no list `conversation`"),
        ("l.json", [*files.LMSYS, {**files.LMSYS[0], "tstamp": "x"}], "record 3", "`tstamp` must be"),
        ("l.json", [*files.LMSYS, {**files.LMSYS[0], "tstamp": None}], "record 3", "no time, where those before"),
        ("l.json", [*files.LMSYS, {"conversation": [{"role": "user"}]}], "record 3", "without a text"),
        ("s.json", [*files.SHAREGPT, {"conversations": [{"from": "human"}]}], "record 5", "without a text"),
        (
            "t.jsonl",
            '{"muxserve_trace":1,"models":["a"]}\n[0,"a",1,1]\n[1,"a",1,1]\n[2,"b",1,1]\n',
            "line 4",
            "'b' is not among",
        ),
    ],
)
def test_malformed_places_are_named_or_counted(
    tmp_path: Path, name: str, content: object, place: str, says: str
) -> None:
    path = files.write(tmp_path / name, content)  # type: ignore[arg-type]
    with pytest.raises(TraceError, match=says) as caught:
        rows(path, rate=5.0)
    assert f"{name}, {place}: " in str(caught.value)
    workload = open_workload(f"{path}:rate=5,skip_bad=true")
    assert len(list(workload)) >= 1
    assert workload.left_out.bad == 1
    assert f"{name}, {place}: " in workload.left_out.first_bad


def test_an_array_that_stops_being_json_cannot_be_skipped(tmp_path: Path) -> None:
    text = json.dumps(files.LMSYS)
    for broken in (text[:-1] + ", {]", text[:-40]):
        path = files.write(tmp_path / "l.json", broken)
        with pytest.raises(TraceError, match=r"l\.json, record \d: not JSON"):
            rows(path, skip_bad=True)


@pytest.mark.parametrize(
    ("content", "says"),
    [("", "empty"), ("a,b\n1,2\n", "in no format that is known"), ('{"x": 1}', "in no format"), ("\x00\x01", "format")],
)
def test_other_files(tmp_path: Path, content: str, says: str) -> None:
    with pytest.raises(WorkloadError, match=says):
        open_workload(files.write(tmp_path / "x.csv", content))


def test_the_wrong_format_by_name(tmp_path: Path) -> None:
    path = files.write(tmp_path / "x.csv", files.AZURE_2023)
    with pytest.raises(TraceError, match="expected the columns Timestamp, Model"):
        rows(path, format="burstgpt")
    with pytest.raises(WorkloadError, match="is no format; there are azure"):
        rows(path, format="csv")


def test_a_damaged_compressed_file(tmp_path: Path) -> None:
    path = files.write(tmp_path / "x.csv.gz", files.AZURE_2023 * 200)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(WorkloadError, match="damaged or cut off"):
        rows(path, skip_bad=True)


def test_slightly_disordered_logs_are_put_in_order(tmp_path: Path) -> None:
    shuffled = "".join(f"{i ^ 1},m,{i + 1},1,1,c\n" for i in range(9000))
    path = files.write(tmp_path / "b.csv", files.BURSTGPT.splitlines()[0] + "\n" + shuffled)
    made = rows(path)
    assert [row[0] for row in made] == list(range(9000))
    late = shuffled + "2,m,1,1,1,c\n" + "".join(f"{9000 + i},m,1,1,1,c\n" for i in range(5000))
    path = files.write(tmp_path / "b.csv", files.BURSTGPT.splitlines()[0] + "\n" + late)
    with pytest.raises(TraceError, match=r"line 9002: it came \d+ s before .*sort the file"):
        rows(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["array", "csv"])
def test_reading_takes_constant_memory(tmp_path: Path, kind: str) -> None:
    if kind == "array":
        turns = [{"role": role, "content": "word " * 2000} for role in ("user", "assistant")]
        record = {**files.LMSYS[0], "conversation": turns}
        path = files.write(tmp_path / "l.json", [record] * 300)
    else:
        line = files.BURSTGPT.splitlines()[1] + "\n"
        path = files.write(tmp_path / "b.csv", files.BURSTGPT.splitlines()[0] + "\n" + line * 20_000)
    tracemalloc.start()
    count = sum(1 for _ in open_workload(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count in (300, 20_000)
    # The window in which requests are put in order is what is kept.
    assert peak < 3 << 20


def test_estimated_tokens() -> None:
    assert estimated_tokens("") == 0
    assert estimated_tokens("one two three") == 4
    assert estimated_tokens("东京 Tower です") == 2 + 2 + 2
    assert estimated_tokens("don't stop") == 3


def test_a_tokenizer_counts(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"a": 0, "b": 1, "?": 2}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    path = files.write(tmp_path / "l.json", [files.LMSYS[0]])  # type: ignore[list-item]
    assert [row[2:] for row in rows(path, tokenizer=str(tmp_path))] == [(3, 6)]
    assert tokenizer_counter(tmp_path / "tokenizer.json")("a b") == 2
    with pytest.raises(WorkloadError, match="no tokenizer at"):
        tokenizer_counter(tmp_path / "nowhere")
    files.write(tmp_path / "tokenizer.json", "{}")
    with pytest.raises(WorkloadError, match="is not a tokenizer"):
        tokenizer_counter(tmp_path)


@pytest.mark.skipif("MUXSERVE_AZURE_TRACE" not in os.environ, reason="MUXSERVE_AZURE_TRACE names no Azure 2023 trace")
def test_the_real_azure_trace() -> None:
    workload = open_workload(os.environ["MUXSERVE_AZURE_TRACE"], {"a": 3.0, "b": 1.0})
    figures = describe(workload)
    assert figures.overall is not None
    assert figures.overall.requests == 19_366
    # 58 minutes of conversations, as the data set says.
    assert figures.seconds == pytest.approx(3501.72, abs=0.01)
    assert figures.models["a"].requests / 19_366 == pytest.approx(0.75, abs=0.02)
    assert workload.left_out.bad == 0


def test_shipped_traces_can_be_read() -> None:
    for path in sorted((ROOT / "traces").glob("*.jsonl*")):
        assert read_trace(path).requests == list(open_workload(path)), path.name

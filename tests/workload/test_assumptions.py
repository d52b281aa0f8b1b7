"""What a trace's numbers mean is certain, or somebody says it; and it is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from muxserve.cli.app import app
from muxserve.workload import TraceError, WorkloadError, open_workload
from tests.workload import files


def line(**fields: object) -> str:
    given = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2], **fields}
    return json.dumps({name: value for name, value in given.items() if value is not None}) + "\n"


def opened(path: Path, text: object, name: str = "t.jsonl", **keys: object):
    file = files.write(path / name, text)  # type: ignore[arg-type]
    return open_workload(files.with_keys(file, **keys))


BURST = "Timestamp,Model,Request tokens,Response tokens\n5,a,4,4\n45,a,4,4\n"
LMSYS_MS = [{**record, "tstamp": record["tstamp"] * 1000} for record in files.LMSYS]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("seconds", line(timestamp=1.5), r"1\.5 is no whole number"),
        ("more fields", line(chat_id=7), "also have chat_id"),
        ("no hashes", line(hash_ids=None), "lack hash_ids"),
        ("other hashes", line(hash_ids=[1, 2, 3, 4]), "hashes are not like theirs"),
        ("table", BURST, "lacks their columns Total tokens, Log Type"),
        ("talk", LMSYS_MS, "counts seconds since 1970, which 1682351591130 is not"),
    ],
)
def test_a_unit_of_time_that_is_not_certain_is_asked_for(tmp_path: Path, name: str, text: object, why: str) -> None:
    with pytest.raises(WorkloadError, match=f"in which unit are its times.*{why}.*:time_unit=s"):
        opened(tmp_path, text)
    more = {"block_tokens": 150} if name == "other hashes" else {}
    for unit in ("s", "ms"):
        workload = opened(tmp_path, text, time_unit=unit, **more)
        assert f"times in {unit}" in workload.about
        assert len(list(workload)) >= 1


@pytest.mark.parametrize(("unit", "seconds"), [("s", 40.0), ("ms", 0.04), ("us", 0.00004)])
def test_times_are_of_the_unit_that_is_named(tmp_path: Path, unit: str, seconds: float) -> None:
    assert [request.arrival for request in opened(tmp_path, BURST, time_unit=unit)] == [0.0, seconds]
    talk = opened(tmp_path, LMSYS_MS, time_unit="ms")
    assert [request.arrival for request in talk] == [0.0, pytest.approx(10.0)]


def test_the_tokens_of_a_hash_are_asked_for(tmp_path: Path) -> None:
    text = line(input_length=40, hash_ids=[1, 2, 3])
    with pytest.raises(WorkloadError, match=r"how many tokens does a hash stand for.*:block_tokens=N"):
        opened(tmp_path, text, time_unit="s")
    assert "16 tokens per hash" in opened(tmp_path, text, time_unit="s", block_tokens=16).about
    with pytest.raises(TraceError, match=r"line 1: 3 hashes of 32 tokens each do not stand for a prompt of 40"):
        list(opened(tmp_path, text, time_unit="s", block_tokens=32))


@pytest.mark.parametrize(
    ("second", "says"),
    [
        (line(timestamp=2.5), r"line 2: the timestamp 2\.5 is no whole number of milliseconds"),
        (line(hash_ids=[1]), "line 2: 1 hashes of 512 tokens each do not stand for a prompt of 600"),
    ],
)
def test_a_later_line_that_means_something_else_is_named(tmp_path: Path, second: str, says: str) -> None:
    with pytest.raises(TraceError, match=says):
        list(opened(tmp_path, line() + second))


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("m.jsonl", files.MOONCAKE, "(mooncake; times in ms; 512 tokens per hash)"),
        ("b.csv", files.BURSTGPT, "(burstgpt; times in s)"),
        ("l.json", files.LMSYS, "(lmsys; times in s; tokens of its texts estimated)"),
        ("s.json", files.SHAREGPT, "(sharegpt; tokens of its texts estimated)"),
        ("a.csv", files.AZURE_2023, "(azure)"),
        ("o.jsonl", files.OURS, "(muxserve)"),
    ],
)
def test_what_is_certain_is_told(tmp_path: Path, name: str, text: object, told: str) -> None:
    assert opened(tmp_path, text, name, rate=1.0).about == f"{name} {told}"
    out = tmp_path / "out.jsonl"
    arguments = ["workload", "convert", f"{tmp_path / name}:rate=1", "-o", str(out)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert told in " ".join(result.output.split())
    assert told in out.read_text().splitlines()[0]


@pytest.mark.parametrize(
    ("name", "text", "option", "says"),
    [
        ("a.csv", files.AZURE_2023, {"time_unit": "s"}, "time_unit has no effect"),
        ("s.json", files.SHAREGPT, {"time_unit": "s", "rate": 1.0}, "time_unit has no effect"),
        ("o.jsonl", files.OURS, {"time_unit": "s"}, "time_unit has no effect"),
        ("b.csv", files.BURSTGPT, {"block_tokens": 16}, "block_tokens has no effect"),
        ("m.jsonl", line(hash_ids=None), {"time_unit": "ms", "block_tokens": 16}, "block_tokens has no effect"),
        ("m.jsonl", files.MOONCAKE, {"tokenizer": "x"}, "tokenizer has no effect"),
        ("b.csv", files.BURSTGPT, {"all_turns": True}, "all_turns has no effect"),
        ("m.jsonl", files.MOONCAKE, {"time_unit": "min"}, "is no time_unit; there are s, ms, us, ns"),
    ],
)
def test_options_that_have_no_effect_on_a_file_are_refused(
    tmp_path: Path, name: str, text: object, option: dict[str, object], says: str
) -> None:
    with pytest.raises(WorkloadError, match=says):
        opened(tmp_path, text, name, **option)


@pytest.mark.parametrize(
    "key", ["format=azure", "map=rates", "tokenizer=x", "all_turns=true", "skip_bad=true", "time_unit=s"]
)
def test_a_generator_has_no_keys_of_files(key: str) -> None:
    with pytest.raises(WorkloadError, match=f"{key.partition('=')[0]!r} is no key"):
        open_workload(f"even:rate=1,duration=2,models=a,{key}")


def test_lengths_beside_both_sides_have_no_effect() -> None:
    with pytest.raises(WorkloadError, match="lengths has no effect beside prompt and output"):
        open_workload("even:rate=1,lengths=short,prompt=8,output=8,models=a")

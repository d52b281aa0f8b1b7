"""Logs: lines of JSON, files of a fleet's parts, their last lines, what is appended, and how they are bounded."""

from __future__ import annotations

import io
import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from muxserve.cluster.events import PartId, Starting
from muxserve.cluster.log_tail import LogTail
from muxserve.net.logs import Follower, JsonLines, JsonLineStream, log_files, matching, of_request, rotate, tail
from tests.support.patience import PATIENCE

SAY = """
import logging
from muxserve.net.logs import choose, log_to_stderr, request_id
choose("json")
log_to_stderr()
log = logging.getLogger("muxserve.some.part")
log.info("nothing %s", "new")
request_id.set("http-1")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("a line\\nand another", extra={"unit_request": "g-1"})
from vllm.logger import init_logger
init_logger("vllm.some.part").warning("from below")
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for name in ("logs", "u0/logs"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("logs/gateway-0.log", "u0/logs/unit.log", "u0/logs/engine-m-decode.log"):
        (tmp_path / name).write_text("".join(f"{name} {number}\n" for number in range(5)))
    return tmp_path


def append(path: Path, text: str) -> None:
    with path.open("a") as log:
        log.write(text)


def test_a_line_is_an_object_whoever_writes_it() -> None:
    done = subprocess.run([sys.executable, "-c", SAY], capture_output=True, text=True, check=True)
    first, second, third = map(json.loads, done.stderr.splitlines())
    assert set(first) == {"time", "level", "logger", "pid", "message"}
    assert (first["level"], first["logger"], first["message"]) == ("info", "muxserve.some.part", "nothing new")
    assert (second["request_id"], second["unit_request"]) == ("http-1", "g-1")
    assert second["message"] == "a line\nand another"
    assert "ZeroDivisionError" in second["error"]
    assert (third["logger"], third["message"]) == ("vllm.some.part", "from below")


@pytest.mark.parametrize(
    ("level", "shown"), [("debug", ["debug", "info", "warning"]), ("info", ["info", "warning"]), ("error", [])]
)
def test_the_level_is_that_of_all_processes_and_libraries_are_not_debugged(level: str, shown: list[str]) -> None:
    script = f"""
import logging, os, subprocess, sys
from muxserve.net.logs import choose, log_to_stderr
choose("text", {level!r})
child = "import logging; from muxserve.net.logs import log_to_stderr; log_to_stderr();"
child += "ours = logging.getLogger('muxserve.unit');"
child += "ours.debug('ours'); ours.info('ours'); ours.warning('ours'); logging.getLogger('library').debug('theirs')"
subprocess.run([sys.executable, "-c", child], check=True)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stderr
    assert [line.split()[2].lower() for line in said.splitlines()] == shown


def test_times_are_utc() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "x", (), None)
    record.created = 1_000_000_000.5
    assert json.loads(JsonLines().format(record))["time"] == "2001-09-09T01:46:40.500Z"
    assert of_request("g-1") == {"unit_request": "g-1"}


def test_what_a_command_prints_becomes_objects() -> None:
    target = io.StringIO()
    stream = JsonLineStream(target, "muxserve.deploy", "error")
    stream.write("one ")
    stream.write("line\n\ntwo\nbegun")
    found = [json.loads(line) for line in target.getvalue().splitlines()]
    assert [(each["message"], each["level"], each["logger"]) for each in found] == [
        ("one line", "error", "muxserve.deploy"),
        ("two", "error", "muxserve.deploy"),
    ]


def test_parts_are_chosen_by_name(run_dir: Path) -> None:
    files = log_files(run_dir)
    assert list(files) == ["gateway-0", "u0/engine-m-decode", "u0/unit"]
    assert list(matching(files, "u0/unit")) == ["u0/unit"]
    assert list(matching(files, "u0")) == ["u0/engine-m-decode", "u0/unit"]
    assert list(matching(files, "engine")) == ["u0/engine-m-decode"]
    assert not matching(files, "u1")


def test_the_last_lines(run_dir: Path) -> None:
    path = run_dir / "logs/gateway-0.log"
    assert tail(path, 2) == ["logs/gateway-0.log 3", "logs/gateway-0.log 4"]
    assert tail(path, 0) == []
    # Only the end of a long log is read, and no half line of it is shown.
    assert tail(path, 9, most_bytes=30) == ["logs/gateway-0.log 4"]


def test_what_is_appended(run_dir: Path) -> None:
    path = run_dir / "u0/logs/unit.log"
    following = Follower(run_dir, "u0")
    assert list(following.last(1)) == [
        ("u0/engine-m-decode", "u0/logs/engine-m-decode.log 4"),
        ("u0/unit", "u0/logs/unit.log 4"),
    ]
    append(path, "whole\nha")
    assert list(following.new()) == [("u0/unit", "whole")]
    append(run_dir / "logs/gateway-0.log", "not asked for\n")
    (run_dir / "u0/logs/memory.log").write_text("a new part\n")
    append(path, "lf\n")
    assert sorted(following.new()) == [("u0/memory", "a new part"), ("u0/unit", "half")]
    assert rotate(path, most_bytes=1)
    append(path, "begins anew\n")
    assert list(following.new()) == [("u0/unit", "begins anew")]
    following.close()


@pytest.mark.parametrize("creates", [False, True])
def test_a_log_that_is_renamed_is_followed_to_its_end_and_under_its_name(run_dir: Path, creates: bool) -> None:
    path = run_dir / "u0/logs/unit.log"
    following = Follower(run_dir, "u0/unit")
    assert len(list(following.last(9))) == 5
    moved = path.rename(path.with_name("unit.log.1"))
    if creates:
        path.touch()
    append(moved, "written by who has it open\n")
    assert list(following.new()) == [("u0/unit", "written by who has it open")]
    append(moved, "and the last\n")
    # More than the old one had: its size does not tell that it is another file.
    append(path, "of the new file\n" * 50)
    assert [line for _, line in following.new()] == ["and the last", *["of the new file"] * 50]
    path.rename(path.with_name("unit.log.2"))
    assert list(following.new()) == []
    append(path, "a third\n")
    assert list(following.new()) == [("u0/unit", "a third")]
    following.close()


WRITES = """
import logging, os, sys
from pathlib import Path
from muxserve.net.heartbeat import Heartbeat
from muxserve.net.logs import log_to_stderr
log_to_stderr()
beats = Heartbeat(Path(sys.argv[1]))
for order in sys.stdin:
    match order.strip():
        case "beat":
            beats._log_due = 0.0
            beats.beat()
        case "write":
            os.write(2, b"not through logging\\n")
        case "log":
            logging.getLogger("some.library").warning("a line")
    print("done", flush=True)
"""


@pytest.mark.parametrize("creates", [False, True])
def test_a_process_goes_on_in_a_file_of_the_old_name(tmp_path: Path, creates: bool) -> None:
    """As after logrotate, with `create` or without; whoever logs, and what is not logged but written."""
    path = tmp_path / "part.log"
    with path.open("a") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", WRITES, str(tmp_path / "part.beat")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None

    def tell(order: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{order}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"

    tell("log")
    first = path.rename(tmp_path / "part.log.1")
    if creates:
        path.touch()
    tell("log")
    second = path.rename(tmp_path / "part.log.2")
    tell("beat")
    assert path.exists(), "a log has its file although nothing is said"
    tell("write")
    process.stdin.close()
    assert process.wait(PATIENCE) == 0
    process.stdout.close()
    assert [each.read_text().count("a line\n") for each in (first, second)] == [1, 1]
    assert path.read_text() == "not through logging\n"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("renamed", [False, True])
def test_the_reason_of_an_end_is_read_from_where_the_log_is_now(tmp_path: Path, renamed: bool) -> None:
    part = PartId("unit")
    (name,) = part.log_names
    path = tmp_path / name
    path.write_text("of the one before\n")
    logs = LogTail(tmp_path)
    logs.note(Starting(part))
    if renamed:
        path.rename(path.with_name(f"{name}.1"))
    append(path, "a line of its own, longer than all that there was\n")
    assert logs.of(part) == (path, ("a line of its own, longer than all that there was",))


def test_a_log_that_grows_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "unit.log"
    with path.open("a") as writer:
        for number in range(6):
            writer.write(f"{number}")
            writer.flush()
            assert not rotate(path, most_bytes=1)
            writer.write("x")
            writer.flush()
            assert rotate(path, most_bytes=1, kept=3)
            # Whoever has it open goes on at its beginning.
            assert path.stat().st_size == 0
    found = {each.name: each.read_text() for each in tmp_path.iterdir()}
    assert found == {"unit.log": "", "unit.log.1": "5x", "unit.log.2": "4x", "unit.log.3": "3x"}


def test_a_disk_that_is_full_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "unit.log"
    path.write_text("much")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    assert not rotate(path, most_bytes=1)
    assert path.read_text() == "much"

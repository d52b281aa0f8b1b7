"""What the contract says of sources of vLLM, by small ones; and that the installed vLLM keeps it."""

from __future__ import annotations

import importlib.util
import tarfile
from pathlib import Path

import pytest

from muxserve.vllm.contract import Contract, Facts, main, read_facts
from muxserve.vllm.pin import SUPPORTED, VLLM_VERSION

OLD = {
    "__init__.py": "",
    "v1/__init__.py": "",
    "v1/sched.py": '''
class Base:
    def free(self, request): ...

class Scheduler(Base):
    def __init__(self, config):
        self.errors: set[str] = set()

    def schedule(self, throttle=False):
        """Decide."""
        return 1

    def load(self, model): ...
''',
    "v1/layout.py": "def publish(executor, name): ...\n",
    "cli.py": "class Args: ...\n",
}
OURS = {
    "__init__.py": "",
    "engine/__init__.py": "",
    "engine/scheduler.py": """
from vllm.v1.sched import Scheduler
from vllm.v1 import layout

class Ours(Scheduler):
    def schedule(self, throttle=False):
        return super().schedule(throttle)

    def load(self, model): ...

    def fail(self, request):
        self.errors.add(request)
        self.free(request)

def settle(executor):
    layout.publish(executor, "LBNHC")
""",
    "gateway/__init__.py": "",
    "gateway/seam.py": """
from muxserve.vllm.since import since

if since("2.0.0"):
    from vllm.common import Args
else:
    from vllm.cli import Args
""",
}
PINNED = [("vllm.v1.sched", "Scheduler.schedule", ("throttle",)), ("vllm.v1.sched", "Scheduler.free", ())]
OVERRIDES = {"ours.engine.scheduler.Ours": ("schedule", "load")}
SCHEDULER = "vllm.v1.sched.Scheduler"


def contract(folder: Path, version: str, changes: dict[str, tuple[str, str]] | None = None) -> Contract:
    """The findings on `OURS` with `OLD`, in whose files each text is replaced by another; no text: the whole file."""
    vllm, ours = folder / version / "vllm", folder / "ours"
    for root, files in ((vllm, OLD), (ours, OURS)):
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    for name, (before, after) in (changes or {}).items():
        text = OLD.get(name, "")
        assert before in text
        (vllm / name).write_text(text.replace(before, after) if before else after)
    return Contract(vllm, version, ours, PINNED, OVERRIDES)


@pytest.fixture
def read(tmp_path: Path) -> dict[str, Facts]:
    """What somebody has read of version 1.0.0, which fits."""
    first = contract(tmp_path, "1.0.0")
    read = {"1.0.0": first.facts}
    assert first.findings(read) == []
    assert set(first.facts.bodies) == {f"{SCHEDULER}.schedule", f"{SCHEDULER}.load"}
    assert first.facts.attributes == {f"{SCHEDULER}.errors": "set[str]"}
    return read


@pytest.mark.parametrize(
    ("name", "before", "after", "finding"),
    [
        ("v1/sched.py", "return 1", "return 2",
         f"{SCHEDULER}.schedule changed since 1.0.0: read lines 9 to 11 of vllm/v1/sched.py; "
         "ours.engine.scheduler.Ours.schedule replaces it"),
        ("v1/sched.py", "set[str] = set()", "dict[str, str] = {}",
         f"{SCHEDULER}.errors is declared as dict[str, str], and was set[str]: read lines 7 to 7 of vllm/v1/sched.py"),
        ("v1/sched.py", "def free(self, request): ...", "pass", "vllm.v1.sched.Scheduler.free is gone"),
        ("v1/sched.py", "throttle=False", "hold=False", f"{SCHEDULER}.schedule no longer has throttle"),
        ("v1/sched.py", "def load(self, model)", "def load(self, model, cache)",
         f"{SCHEDULER}.load is called with 2 positional arguments, and ours takes 1 (ours.engine.scheduler.Ours.load): "
         "read lines 13 to 13 of vllm/v1/sched.py"),
        ("v1/sched.py", "def free(self, request)", "def free(self, request, why)",
         "vllm.v1.sched.Base.free also needs why, as ours/engine/scheduler.py:13 calls it: "
         "read lines 3 to 3 of vllm/v1/sched.py"),
        ("v1/layout.py", "(executor, name)", "(executor, name, size)",
         "vllm.v1.layout.publish also needs size, as ours/engine/scheduler.py:16 calls it: "
         "read lines 1 to 1 of vllm/v1/layout.py"),
        ("cli.py", "Args", "Other", "vllm.cli.Args is gone, which ours/gateway/seam.py:7 imports"),
    ],
)  # fmt: skip
def test_a_change_is_a_sentence(
    tmp_path: Path, read: dict[str, Facts], name: str, before: str, after: str, finding: str
) -> None:
    assert finding in contract(tmp_path, "1.1.0", {name: (before, after)}).findings(read)


def test_comments_and_docstrings_are_no_change(tmp_path: Path, read: dict[str, Facts]) -> None:
    changes = {"v1/sched.py": ('"""Decide."""\n', '"""Decide what runs."""\n        # At once.\n\n')}
    assert contract(tmp_path, "1.1.0", changes).findings(read) == []


def test_a_method_that_is_newly_replaced_was_never_read(tmp_path: Path, read: dict[str, Facts]) -> None:
    less = {"1.0.0": Facts({f"{SCHEDULER}.load": read["1.0.0"].bodies[f"{SCHEDULER}.load"]}, {})}
    assert contract(tmp_path, "1.0.0").findings(less) == [
        f"{SCHEDULER}.schedule was never read: read lines 9 to 11 of vllm/v1/sched.py; "
        "ours.engine.scheduler.Ours.schedule replaces it"
    ]


def test_each_version_takes_its_own_branch(tmp_path: Path, read: dict[str, Facts]) -> None:
    moved = {"cli.py": ("Args", "Other"), "common.py": ("", "class Args: ...\n")}
    assert contract(tmp_path, "2.0.0", moved).findings(read) == []
    found = contract(tmp_path, "2.0.1").findings(read)
    assert found == ["vllm.common.Args is gone, which ours/gateway/seam.py:5 imports"]


def test_of_every_supported_version_all_was_read() -> None:
    assert set(read_facts()) == set(SUPPORTED)


@pytest.mark.slow
def test_the_installed_vllm_fits(capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    status = main([spec.submodule_search_locations[0]])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert printed.startswith(f"vLLM {VLLM_VERSION} fits")


@pytest.mark.parametrize(
    ("place", "sentence"),
    [("nowhere", "is neither a file, nor a folder, nor a version"), ("{tmp}", "has no package vllm")],
)
def test_without_sources_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, sentence: str
) -> None:
    assert main([place.format(tmp=tmp_path)]) == 2
    assert sentence in capsys.readouterr().err


def test_an_archive_without_the_package_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = tmp_path / "other-1.0.tar.gz"
    (tmp_path / "PKG-INFO").write_text("Version: 1.0\n")
    with tarfile.open(archive, "w:gz") as made:
        made.add(tmp_path / "PKG-INFO", "other-1.0/PKG-INFO")
    assert main([str(archive)]) == 2
    assert "has no package vllm" in capsys.readouterr().err

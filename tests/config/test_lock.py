"""The lock is of the pins, with a hash for each; tools/lock.py writes it from what pip reports."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(
    r"^(?P<name>[\w.-]+)==(?P<version>[^\s+]+)(\+cpu)?( ; (?P<marker>[^#]+?))?"
    r"(?P<hashes>( --hash=sha256:[0-9a-f]{64})*)( +#.*)?$"
)
LOCKS = sorted(ROOT.glob("requirements/cpu-*.lock"))
tool = runpy.run_path(str(ROOT / "tools/lock.py"))


def pins(path: Path) -> dict[str, tuple[str, str, bool]]:
    """Each package's version, marker, and whether it has a hash, by its normal name."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    found = [match for line in lines if (match := LINE.match(line))]
    assert len(found) == len(lines)
    return {
        re.sub(r"[-_.]+", "-", each["name"]).lower(): (each["version"], each["marker"] or "", bool(each["hashes"]))
        for each in found
    }


def test_every_python_has_a_lock() -> None:
    assert [lock.stem for lock in LOCKS] == [f"cpu-{python}" for python in tool["PYTHONS"]]


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_a_lock_has_every_pin_with_its_hash(lock: Path) -> None:
    pinned = pins(ROOT / "requirements/cpu.txt")
    assert pins(lock) == {name: (version, marker, True) for name, (version, marker, _) in pinned.items()}


def test_a_lock_is_made_of_pip_s_reports() -> None:
    def package(name: str, digest: str = "ab", **metadata: object) -> dict[str, object]:
        archive = {"hashes": {"sha256": digest * 32}}
        return {"metadata": {"name": name, "version": "1.0", **metadata}, "download_info": {"archive_info": archive}}

    reports = {
        "x86_64": [
            package("no-such-b", classifier=["License :: OSI Approved :: MIT License", "Topic :: Other"]),
            package("No-Such-A", license="line one\nline two"),
            package("no-such-c"),
        ],
        "aarch64": [package("no-such-b"), package("No-Such-A", "cd")],
    }
    only = [Requirement('no-such-c==1.0 ; platform_machine == "x86_64"')]
    lines = tool["locked"](only, "3.12", reports).splitlines()
    assert "Python 3.12" in lines[0]
    one, other = (f" --hash=sha256:{digest * 32}" for digest in ("ab", "cd"))
    assert lines[2:] == [
        f"No-Such-A==1.0{one}{other}  # line one",
        f"no-such-b==1.0{one}  # MIT License",
        f'no-such-c==1.0 ; platform_machine == "x86_64"{one}',
    ]

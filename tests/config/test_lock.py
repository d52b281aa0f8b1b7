"""The lock is of the pins, with a hash for each; tools/lock.py writes it from what pip reports."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINE = re.compile(r"^(?P<name>[\w.-]+)==(?P<version>[^\s+]+)(\+cpu)?(?P<hash> --hash=sha256:[0-9a-f]{64})?( +#.*)?$")


def pins(path: Path) -> dict[str, tuple[str, bool]]:
    """Of each package's normal name, its version and whether it has a hash."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    found = [match for line in lines if (match := LINE.match(line))]
    assert len(found) == len(lines)
    return {re.sub(r"[-_.]+", "-", each["name"]).lower(): (each["version"], bool(each["hash"])) for each in found}


@pytest.mark.parametrize("lock", sorted(ROOT.glob("requirements/cpu-*.lock")), ids=lambda path: path.stem)
def test_a_lock_has_every_pin_with_its_hash(lock: Path) -> None:
    pinned = pins(ROOT / "requirements/cpu.txt")
    assert pins(lock) == {name: (version, True) for name, (version, _) in pinned.items()}


def test_a_lock_is_made_of_pip_s_report() -> None:
    def package(name: str, **metadata: object) -> dict[str, object]:
        archive = {"hashes": {"sha256": "ab" * 32}}
        return {"metadata": {"name": name, "version": "1.0", **metadata}, "download_info": {"archive_info": archive}}

    install = [
        package("no-such-b", classifier=["License :: OSI Approved :: MIT License", "Topic :: Other"]),
        package("No-Such-A", license="line one\nline two"),
        package("no-such-c"),
    ]
    locked = runpy.run_path(str(ROOT / "tools/lock.py"))["locked"]
    lines = locked({"install": install, "environment": {"python_version": "3.12"}}).splitlines()
    assert "Python 3.12" in lines[0]
    hashed = f"==1.0 --hash=sha256:{'ab' * 32}"
    assert lines[2:] == [f"No-Such-A{hashed}  # line one", f"no-such-b{hashed}  # MIT License", f"no-such-c{hashed}"]

"""Write the lock of requirements/cpu.txt for one Python: each package's version, SHA-256 and licence.

    .venv/bin/python tools/lock.py          # writes requirements/cpu-3.11.lock with Python 3.11

pip says which files it would install on this machine, and fetches their metadata only. `make setup LOCKED=1` installs
what the lock has, and nothing with another hash.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "requirements/cpu.txt"
LICENCE = "License :: OSI Approved :: "


def licence(metadata: Mapping[str, Any]) -> str:
    """As the package's metadata has it, in a line; empty where it does not say."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        # Of the installed package, since old pips leave out what the newest metadata has.
        expression = importlib.metadata.metadata(metadata["name"]).get("License-Expression")
        if expression:
            return str(expression)
    named = [each.removeprefix(LICENCE) for each in metadata.get("classifier", []) if each.startswith(LICENCE)]
    said = "; ".join(named) or metadata.get("license") or ""
    first = said.strip().splitlines()[0] if said.strip() else ""
    return first if len(first) <= 80 else ""


def locked(report: dict[str, Any]) -> str:
    """The lines of a lock from pip's report of an installation."""
    lines = []
    for each in sorted(report["install"], key=lambda each: each["metadata"]["name"].lower()):
        metadata = each["metadata"]
        sha256 = each["download_info"]["archive_info"]["hashes"]["sha256"]
        of = licence(metadata)
        lines.append(f"{metadata['name']}=={metadata['version']} --hash=sha256:{sha256}" + (f"  # {of}" if of else ""))
    python = report["environment"]["python_version"]
    head = [
        f"# Written by tools/lock.py from {PINS.name}: files for Python {python} on Linux, x86-64, with licences",
        "# where packages name theirs. Not to be edited.",
    ]
    return "\n".join([*head, *lines]) + "\n"


def main() -> None:
    """Ask pip, and write the lock beside the pins."""
    asked = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed",
             "--only-binary", ":all:", "--report", "-", "-r", str(PINS)]  # fmt: skip
    report = json.loads(subprocess.run(asked, check=True, stdout=subprocess.PIPE).stdout)
    place = PINS.with_name(f"{PINS.stem}-{report['environment']['python_version']}.lock")
    place.write_text(locked(report))
    print(f"{place.relative_to(ROOT)}: {len(report['install'])} packages")


if __name__ == "__main__":
    main()

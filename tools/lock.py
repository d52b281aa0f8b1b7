"""Write the locks of requirements/cpu.txt: each package's version, licence, and SHA-256 for x86-64 and arm64.

    .venv/bin/python tools/lock.py                 # all of them: requirements/cpu-3.11.lock and so on
    .venv/bin/python tools/lock.py --python 3.12   # one of them

pip says which files it would install, and fetches their metadata only. `make setup LOCKED=1` installs what the lock
has, and nothing with another hash.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "requirements/cpu.txt"
PYTHONS = ("3.11", "3.12", "3.13")
# As Python and wheels call them. pip needs every name of a platform whose wheels fit: of the C library's versions up to
# that of Debian 12.
MACHINES = ("x86_64", "aarch64")
PLATFORMS = (*(f"manylinux_2_{version}_" for version in range(5, 37)), "manylinux2014_", "manylinux2010_", "linux_")
LICENCE = "License :: OSI Approved :: "
# PyTorch's builds for CPUs are on an index of their own, which not every pip is pointed to. These hashes are those that
# it publishes.
TORCH = "2.13.0+cpu"
TORCH_SHA256 = {
    ("3.11", "x86_64"): "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
    ("3.11", "aarch64"): "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",
    ("3.12", "x86_64"): "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",
    ("3.12", "aarch64"): "6f307c2c32d764ffc6ff6893b801fad6d4752f3e67966cb8abf1843427c02604",
    ("3.13", "x86_64"): "3fbf9c9d1f3c10c2d59d04aca426dee9ccc6ceb32d255c61e93acc3b4f75fae6",
    ("3.13", "aarch64"): "0b8f7d0423027ae8b90c7977c627f3379f325363a08224dffad9b4b2d684a83d",
}


def pinned() -> list[Requirement]:
    """The pins."""
    lines = (line.partition("#")[0].strip() for line in PINS.read_text().splitlines())
    return [Requirement(line) for line in lines if line]


def licence(metadata: Mapping[str, Any]) -> str:
    """As the package's metadata has it, in a line; empty where it does not say."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        # From the installed package, since old pips leave out what the newest metadata has.
        expression = importlib.metadata.metadata(metadata["name"]).get("License-Expression")
        if expression:
            return str(expression)
    named = [each.removeprefix(LICENCE) for each in metadata.get("classifier", []) if each.startswith(LICENCE)]
    said = "; ".join(named) or metadata.get("license") or ""
    first = said.strip().splitlines()[0] if said.strip() else ""
    return first if len(first) <= 80 else ""


def reported(pins: Iterable[Requirement], python: str, machine: str) -> list[dict[str, Any]]:
    """What pip would install there: an entry of its report for each pin."""
    asked = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed",
             "--only-binary", ":all:", "--report", "-", "--python-version", python]  # fmt: skip
    for platform in PLATFORMS:
        asked += ["--platform", platform + machine]
    with tempfile.TemporaryDirectory() as nothing:  # pip wants to know where files of other machines would go
        # Without markers, which pip would compare with this machine.
        asked += ["--target", nothing, *(f"{pin.name}{pin.specifier}" for pin in pins)]
        done = subprocess.run(asked, check=True, stdout=subprocess.PIPE)
    return list(json.loads(done.stdout)["install"])


def locked(pins: Iterable[Requirement], python: str, reports: Mapping[str, Iterable[dict[str, Any]]]) -> str:
    """The lines of a lock for one Python from pip's reports by machine."""
    markers = {pin.name.lower().replace("_", "-"): pin.marker for pin in pins}
    hashes: dict[tuple[str, str], list[str]] = {}
    licences: dict[tuple[str, str], str] = {}
    for entries in reports.values():
        for each in entries:
            package = each["metadata"]["name"], each["metadata"]["version"]
            licences.setdefault(package, licence(each["metadata"]))
            hashes.setdefault(package, []).append(each["download_info"]["archive_info"]["hashes"]["sha256"])
    lines = [
        f"# Written by tools/lock.py from {PINS.name}: files for Python {python} on Linux, x86-64 and arm64, with",
        "# licences where packages name theirs. Not to be edited.",
    ]
    for name, version in sorted(hashes, key=lambda package: package[0].lower()):
        line = f"{name}=={version}"
        if marker := markers.get(name.lower().replace("_", "-")):
            line += f" ; {marker}"
        line += "".join(f" --hash=sha256:{digest}" for digest in dict.fromkeys(hashes[name, version]))
        lines.append(line + (f"  # {said}" if (said := licences[name, version]) else ""))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Ask pip, and write the locks beside the pins."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", choices=PYTHONS, action="append", help="all without it")
    for python in parser.parse_args().python or PYTHONS:
        reports = {}
        for machine in MACHINES:
            there = {"platform_machine": machine}
            fitting = [pin for pin in pinned() if not pin.marker or pin.marker.evaluate(there)]
            reports[machine] = reported((pin for pin in fitting if pin.name != "torch"), python, machine)
            archive = {"hashes": {"sha256": TORCH_SHA256[python, machine]}}
            torch = {"metadata": {"name": "torch", "version": TORCH}, "download_info": {"archive_info": archive}}
            reports[machine].append(torch)
        place = PINS.with_name(f"{PINS.stem}-{python}.lock")
        place.write_text(locked(pinned(), python, reports))
        print(f"{place.relative_to(ROOT)}: {', '.join(f'{len(each)} for {name}' for name, each in reports.items())}")


if __name__ == "__main__":
    main()

"""What probes found of a machine's GPUs, and what is done there instead of what did not work; remembered in a file.

A finding counts for one machine with one driver, one set of GPUs and one build of torch and vLLM. Anything else has to
be tried anew.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from muxserve.gpu.nvml import GpuMachine

Fallback = Literal[
    "refuse",
    "mps_off",
    "ipc_legacy",
    "keepers_in_mps",
    "piecewise",
    "nvls_off",
    "fcfs",
    "restart_mps",
    "no_green_contexts",
    "no_percentages",
]
FALLBACK_WORDS: Mapping[Fallback, str] = {
    "refuse": "nothing can be served on these GPUs",
    "mps_off": "`mps: off`: engines alternate on a GPU",
    "ipc_legacy": "pools and weights are shared by legacy CUDA IPC, and new ones are made when their holder dies",
    "keepers_in_mps": "weights and pools are kept inside MPS, and end with its server",
    "piecewise": "CUDA graphs leave attention out",
    "nvls_off": "NCCL does without the NVSwitch's multicast",
    "fcfs": "engines of several ranks compute one at a time (`policy: fcfs`)",
    "restart_mps": "the MPS server is started again whenever an engine was killed",
    "no_green_contexts": "engines have no green contexts",
    "no_percentages": "engines have no percentages of the SMs",
}


# The probe that shows whether CUDA graphs may hold attention.
GRAPHS = "attention in a CUDA graph"
# Those that show whether engines with SMs of their own, or with percentages of them, compute the same side by side.
GREEN = "green contexts"
PERCENTAGES = "percentages side by side"
# The one that computes the shapes of a fleet's models with the percentages that its engines would have.
SHAPES = "the fleet's shapes with its percentages"


class ProbeFinding(msgspec.Struct, frozen=True):
    """One probe: what came of it, in words and figures, how long it took, and what is done instead if it failed."""

    probe: str
    verdict: Literal["ok", "failed", "not tried"]
    detail: str
    seconds: float = 0.0
    fallbacks: tuple[Fallback, ...] = ()


class ProbedMachine(msgspec.Struct, frozen=True):
    """What findings count for."""

    host: str
    driver: str
    cuda: str
    gpus: tuple[str, ...]
    packages: dict[str, str]


class Findings(msgspec.Struct, frozen=True):
    """All probes of one machine."""

    place: ProbedMachine
    date: str
    findings: tuple[ProbeFinding, ...]

    @property
    def fallbacks(self) -> frozenset[Fallback]:
        """What is to be done differently here."""
        return frozenset(each for finding in self.findings for each in finding.fallbacks)

    @property
    def full_graphs(self) -> bool | None:
        """Whether CUDA graphs may hold attention; None if that was not tried."""
        return self._works(GRAPHS)

    @property
    def green_contexts(self) -> bool | None:
        """Whether engines may have green contexts; None if that was not tried."""
        return self._works(GREEN)

    @property
    def percentages(self) -> bool | None:
        """Whether engines may have percentages of the SMs; None if that was not tried."""
        works = self._works(PERCENTAGES)
        return False if self._works(SHAPES) is False else works

    def _works(self, probe: str) -> bool | None:
        verdict = next((each.verdict for each in self.findings if each.probe == probe), "not tried")
        return None if verdict == "not tried" else verdict == "ok"

    @property
    def refused(self) -> str:
        """Why nothing can be served here; empty if something can."""
        return "; ".join(f"{each.probe}: {each.detail}" for each in self.findings if "refuse" in each.fallbacks)

    @property
    def cannot_serve(self) -> str:
        """`refused` with what to do about it, in words."""
        found = f"these GPUs cannot serve, by the probes of {self.date}: {self.refused}"
        return f"{found}; run `muxserve doctor --gpu` again when that is mended"

    @property
    def followed(self) -> list[str]:
        """What is done differently here, in words."""
        return [f"as the probes have found: {FALLBACK_WORDS[each]}" for each in sorted(self.fallbacks)]


def place_of(found: GpuMachine, packages: Mapping[str, str]) -> ProbedMachine:
    """The machine as it is now; `packages` are versions by name."""
    gpus = tuple(sorted(f"{gpu.name} {gpu.uuid}" for gpu in found.gpus))
    return ProbedMachine(socket.gethostname(), found.driver_version, found.cuda_version, gpus, dict(packages))


def remembered(place: ProbedMachine, file: Path | None = None) -> Findings | None:
    """The findings at `place`; None if there are none with these GPUs, this driver and these packages."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        found = msgspec.json.decode((file or default_file()).read_bytes(), type=Findings)
        if covers(found.place, place):
            return found
    return None


def covers(tried: ProbedMachine, place: ProbedMachine) -> bool:
    """Whether what was found at `tried` counts at `place`: some of its GPUs may be hidden there."""
    same = (tried.host, tried.driver, tried.cuda, tried.packages) == (
        place.host, place.driver, place.cuda, place.packages,
    )  # fmt: skip
    return same and set(place.gpus) <= set(tried.gpus)


def remember(findings: Findings, file: Path | None = None) -> Path:
    """Write it down, in place of what was found before.

    Raises:
        OSError: it cannot be written.
    """
    file = file or default_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".new")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(findings), indent=1))
    os.replace(temporary, file)
    return file


def default_file() -> Path:
    """Where findings are kept."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(cache) / "muxserve" / "gpu.json"


def report(findings: Findings) -> Sequence[tuple[str, str, str]]:
    """Rows of a table for people: verdict, probe, what was found and what is done instead."""
    rows = []
    for each in findings.findings:
        instead = "".join(f"\n-> {FALLBACK_WORDS[name]}" for name in each.fallbacks)
        rows.append((each.verdict, each.probe, f"{each.detail} ({each.seconds:.0f} s){instead}"))
    return rows

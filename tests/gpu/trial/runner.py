"""Runs steps one after another within a time, each with a limit of its own, and writes what came of them as it comes.

All results are in one JSON file. It is written anew when a step begins and when it ends, so that whatever ends the
trial leaves it whole. A step writes its figures into a file of its own as it makes them: they count also where it ran
out of time.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from muxserve.gpu.environment import without_compiler

ROOT = Path(__file__).resolve().parents[3]
# Seconds in which a step that was asked to end ends what it has started.
GRACE = 12.0
LAST_LINES = 12
# A rehearsal runs on whatever machine is there, and its steps have so many times their limits.
SLOW = 20
# How lines of a step's output begin that are for people.
FINDING = "finding: "

Wait = Callable[[subprocess.Popen[bytes], float], int | None]


@dataclass(frozen=True)
class Rehearsal:
    """How a step is tried over stand-ins of the driver, where kernels compute nothing.

    Args:
        arguments: added to the command, so that there is little work.
        environment: of the step, beside that of the others.
        unseen: what stand-ins cannot show, in words; empty if the step shows all that it would.
    """

    arguments: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    unseen: str = "what kernels compute, and how fast"


@dataclass(frozen=True)
class Step:
    """One step of the trial.

    Args:
        name: a word, unique.
        section: the letter of its part of the list.
        decides: what is known after it, for people.
        command: a line for bash with `{python}`, `{out}` (the JSON file of this step) and `{state}` (a directory that
            all steps have in common).
        estimate: seconds that it is thought to take.
        limit: seconds after which it is ended.
        needs: names of what must be there (`needs.NEEDS`).
        rehearsal: how it is tried over stand-ins.
        results: files below the state directory that are taken in with the step's own.
    """

    name: str
    section: str
    decides: str
    command: str
    estimate: float
    limit: float
    needs: tuple[str, ...] = ("gpu",)
    rehearsal: Rehearsal = field(default_factory=Rehearsal)
    results: tuple[str, ...] = field(default=())


def wait_for(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit code of a step; None if it has not ended after so many seconds."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


@dataclass
class Trial:
    """A run of steps.

    Args:
        file: of all results.
        about: what is written of the machine.
        seconds: time for all steps together.
        missing: why a need is not met, by its name.
        rehearses: over stand-ins of the driver.
    """

    file: Path
    about: Mapping[str, Any]
    seconds: float
    missing: Mapping[str, str] = field(default_factory=dict)
    rehearses: bool = False
    python: str = sys.executable
    clock: Callable[[], float] = time.monotonic
    wait: Wait = wait_for
    say: Callable[[str], None] = lambda text: print(text, flush=True)

    def __post_init__(self) -> None:
        self.state = self.file.with_suffix(".state")
        self.results: dict[str, dict[str, Any]] = {}

    def begin(self) -> None:
        """Begin from empty: what steps of an earlier run have left for themselves counts no more."""
        shutil.rmtree(self.state, ignore_errors=True)

    def resume(self) -> None:
        """Take over what an earlier run has finished; what it has not is done again.

        Raises:
            ValueError: the file is not that of a trial.
        """
        if not self.file.exists():
            return
        try:
            steps = json.loads(self.file.read_text())["steps"]
            self.results = {name: row for name, row in steps.items() if row["outcome"] == "done"}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{self.file} has no results of a trial; give another file with --out") from None

    def run(self, steps: Sequence[Step]) -> bool:
        """Run those that are not done yet; returns whether all of them are then."""
        self.state.mkdir(parents=True, exist_ok=True)
        end = self.clock() + self.seconds
        for step in steps:
            if self.results.get(step.name, {}).get("outcome") == "done":
                self.say(f"{step.name}: done before")
                continue
            left = end - self.clock()
            if why := self._why_not(step, left):
                self._note(step, outcome="left out", why=why)
                continue
            self._one(step, min(step.limit * (SLOW if self.rehearses else 1), left))
        return all(self.results[step.name]["outcome"] == "done" for step in steps)

    def _why_not(self, step: Step, left: float) -> str:
        lacking = [self.missing[need] for need in step.needs if need in self.missing]
        if lacking:
            return "; ".join(lacking)
        # Half of what it is thought to take still gives its first figures, which are its most decisive ones.
        if left < step.estimate / 2:
            return f"{max(left, 0):.0f} s are left, and it takes about {step.estimate:.0f} s"
        return ""

    def _one(self, step: Step, limit: float) -> None:
        self.say(f"{step.name}: about {step.estimate:.0f} s, ended after {limit:.0f} s; {step.decides}")
        self._note(step, outcome="running", quiet=True)
        began, log = self.clock(), self.state / f"{step.name}.log"
        line = f"{step.command} {step.rehearsal.arguments}" if self.rehearses else step.command
        out = self.state / f"{step.name}.json"
        # Braces of JSON stay as they are.
        for word, value in (("{python}", self.python), ("{out}", str(out)), ("{state}", str(self.state))):
            line = line.replace(word, value)
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", line],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                cwd=ROOT, env=self._environment(step), start_new_session=True,
            )  # fmt: skip
            try:
                code = self.wait(process, limit)
            finally:
                _end(process)
        lines = log.read_text(errors="replace").splitlines()
        findings = [line.removeprefix(FINDING) for line in lines if line.startswith(FINDING)]
        if code is None:
            outcome = "out of time"
        elif code:
            outcome = "failed"
        else:
            # What ends well without a finding has decided nothing.
            outcome = "done" if findings else "no finding"
        found = {
            name: figures for name in (out.name, *step.results) if (figures := read(self.state / name)) is not None
        }
        self._note(
            step,
            outcome=outcome,
            code=code,
            seconds=round(self.clock() - began, 1),
            findings=findings,
            results=found,
            last_lines=[] if outcome == "done" else lines[-LAST_LINES:],
        )

    def _environment(self, step: Step) -> dict[str, str]:
        found = environment(self.state)
        if not self.rehearses:
            return found
        # What probes find is to be there when a rehearsal goes on.
        return {**found, "XDG_CACHE_HOME": str(self.state / "cache"), **step.rehearsal.environment}

    def _note(self, step: Step, quiet: bool = False, **row: Any) -> None:
        unseen = {"unseen": step.rehearsal.unseen} if self.rehearses and step.rehearsal.unseen else {}
        self.results[step.name] = {"section": step.section, "decides": step.decides, **row, **unseen}
        self.write()
        if quiet:
            return
        seconds = f" after {row['seconds']:.0f} s" if "seconds" in row else ""
        lines = [f"{step.name}: {row['outcome']}{seconds} {row.get('why', '')}".rstrip()]
        if not self.rehearses:
            lines += row.get("findings", ())
        elif unseen:
            lines.append(f"stand-ins do not show {step.rehearsal.unseen}")
        self.say("\n  ".join([*lines, *row.get("last_lines", ())]))

    def write(self) -> None:
        """Write all results, whole or not at all."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps({**self.about, "steps": self.results}, indent=1) + "\n")
        os.replace(new, self.file)


def environment(state: Path) -> dict[str, str]:
    """What the commands of steps find: the sources first, and one place for stock vLLM's answers."""
    reference = state / "reference"
    reference.mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    # Stock vLLM compiles kernels with the CUDA toolkit where it is not told that there is none.
    return {**without_compiler(), **os.environ, "PYTHONPATH": path, "MUXSERVE_GPU_REFERENCE": str(reference)}


def finding(words: str) -> None:
    """Print what a step has found, for the one who runs the trial and for its file."""
    print(f"{FINDING}{words}", flush=True)


def read(file: Path) -> Any:
    """The figures of a step; None if it has not written any, or was ended while it wrote them."""
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError):
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have a step end what it started, and end what is left of it, also what has a session of its own: servers, fleets,
    which would keep their part of the GPU."""
    started = _below(process.pid)
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    started += _below(process.pid)
    _signal(process, signal.SIGKILL)
    for each in started:
        # Not if another process has its number by now.
        with contextlib.suppress(Exception):
            each.kill()
    process.wait()


def _below(pid: int) -> list[Any]:
    """All processes that this one has started, and those that these have; none where nobody can tell."""
    try:
        import psutil

        return list(psutil.Process(pid).children(recursive=True))
    except Exception:
        return []


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def listing(steps: Sequence[Step], missing: Mapping[str, str], done: Collection[str] = ()) -> list[str]:
    """The list for people: each step with its estimate, its limit, and what it lacks."""
    lines, total = [], 0.0
    for step in steps:
        lacking = [need for need in step.needs if need in missing]
        if step.name in done:
            note = "  (done)"
        elif lacking:
            note = f"  (left out: {', '.join(lacking)})"
        else:
            note, total = "", total + step.estimate
        lines.append(f"({step.section}) {step.name:22s} {step.estimate:4.0f} s, at most {step.limit:4.0f} s  "
                     f"{step.decides}{note}")  # fmt: skip
    return [*lines, f"{total / 60:.1f} minutes in all, by these estimates"]


def summary(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each step: what came of it, and how long it took."""
    lines, total = [], 0.0
    for name, row in results.items():
        seconds = row.get("seconds", 0.0)
        total += seconds
        lines.append(f"{name:22s} {row['outcome']:11s} {seconds:5.0f} s")
    done = sum(row["outcome"] == "done" for row in results.values())
    return [*lines, f"{done} of {len(results)} steps done, {total / 60:.1f} minutes"]

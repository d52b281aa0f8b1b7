"""Keeps what a unit learns of the costs of its models' steps in a file of the unit's directory: a unit scheduler that
was killed goes on from there when it is started again."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from muxserve.unit.costs import LearntModel, UnitCosts

log = logging.getLogger(__name__)

COSTS_FILE = "learnt-costs"
# What is learnt in so many seconds may be lost.
KEEP_SECONDS = 5.0


class CostsFile:
    """The file in `directory`, and the `costs` that it has. What it has from a unit scheduler before is taken over."""

    def __init__(self, directory: Path, costs: UnitCosts, now: float) -> None:
        self._file = directory / COSTS_FILE
        self._costs = costs
        self._due = now
        self._restore()
        self._kept = costs.reports

    def turn(self, now: float) -> None:
        """Write, if it is time to and something was learnt."""
        if now >= self._due and self._costs.reports != self._kept:
            self._due = now + KEEP_SECONDS
            self.write()

    def write(self) -> None:
        """Write what was learnt since the last time, if anything; whoever reads finds one state or the other."""
        if self._costs.reports == self._kept:
            return
        self._kept = self._costs.reports
        temporary = self._file.with_suffix(".new")
        try:
            temporary.write_bytes(msgspec.msgpack.encode(self._costs.learnt()))
            os.replace(temporary, self._file)
        except OSError as error:
            log.warning("what steps cost cannot be kept: %s", error)

    def _restore(self) -> None:
        try:
            learnt = msgspec.msgpack.decode(self._file.read_bytes(), type=dict[str, LearntModel])
            models = self._costs.restore(learnt)
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:  # msgspec's errors are such
            log.warning("what steps were found to cost is lost: %s", error)
            return
        log.info("costs of %s are as learnt before", ", ".join(models) or "no model")

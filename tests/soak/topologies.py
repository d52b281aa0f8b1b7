"""The fleets that are soaked: files of `configs/`, with paths made absolute and a model that takes poison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.fleet import ROOT
from tests.soak.parts import ENGINE

# vLLM's logits processor, which throws for requests that ask for it (`poison.py`).
_POISON = "tests.soak.poison:Poison"


@dataclass(frozen=True)
class Topology:
    """One fleet. `poisoned` is the model whose engines can be made to throw. `memory`: its models sleep and are woken
    within that, so that its engines come and go. Models whose file says nothing of their engines have two."""

    name: str
    config: str
    models: tuple[str, ...]
    poisoned: str
    units: int = 1
    memory: Mapping[str, object] | None = None

    @property
    def changing(self) -> tuple[str, ...]:
        """The kinds of parts of which there are now more, now fewer."""
        # vLLM is not imported again before somebody is to be forked, when the spare parent has died, too.
        return () if self.memory is None else (ENGINE, "model parent", "vLLM parent", "spare vLLM parent")

    def write(self, directory: Path) -> Path:
        """The fleet file, in `directory`."""
        source = ROOT / "configs" / self.config
        fleet: dict[str, Any] = yaml.safe_load(source.read_text())
        for model in fleet["models"]:
            model["path"] = str((source.parent / model["path"]).resolve())
            if not model.keys() & {"engines", "dispatch", "stages"}:
                model["engines"] = "split"
            if model["name"] == self.poisoned:
                model.setdefault("engine_args", {})["logits_processors"] = [_POISON]
        if self.memory is not None:
            fleet["memory"] = dict(self.memory)
        path = directory / "fleet.yaml"
        path.write_text(yaml.safe_dump(fleet))
        return path


TOPOLOGIES = {
    topology.name: topology
    for topology in (
        Topology("quickstart", "quickstart.yaml", ("arithmetic", "atlas", "frontdesk"), "frontdesk"),
        Topology("replicas", "replicas.yaml", ("arithmetic",), "arithmetic", units=4),
        Topology("rolling", "rolling.yaml", ("arithmetic",), "arithmetic", units=3),
        Topology("pipelined", "pipeline.yaml", ("arithmetic",), "arithmetic"),
        # Two of the three have room, and each wake loads its model again.
        Topology(
            "loading",
            "quickstart.yaml",
            ("arithmetic", "atlas", "frontdesk"),
            "frontdesk",
            memory={"limit": "1700MiB", "min_residence": "500ms"},
        ),
    )
}

"""MuxServe's own planner (github.com/hao-ai-lab/MuxServe), run from a checkout, and its objective for ours.

Nothing of it is here: its module is loaded from the checkout. It imports cvxpy, which it does not use, and asks
transformers for four numbers of each LLaMA; both are stood in for.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import yaml

from muxserve.planning.demand.known_models import BUILT_IN
from placement.demand import Demand, Members, Mesh
from placement.estimator import Estimator, Shares
from placement.objective import Objective
from placement.values import IMPOSSIBLE, Values

PROMPT, OUTPUT = 161, 337  # the lengths that its planner takes for granted
_OVERLOAD = 20  # per cent of the SMs by which it lets a mesh be overcommitted
_FREE = 0.9 * (1 - 0.4) * 80  # GB of each GPU that it gives to weights
_PER_MODEL = 1.6 + 6


def load(checkout: Path) -> Any:
    """Its module."""
    sys.modules.setdefault("cvxpy", types.ModuleType("cvxpy"))
    spec = importlib.util.spec_from_file_location(
        "muxserve_original_placement", checkout / "muxserve/muxsched/placement.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    standing_in = types.ModuleType("transformers")
    standing_in.AutoConfig = _AutoConfig  # type: ignore[attr-defined]
    before = sys.modules.get("transformers")
    sys.modules["transformers"] = standing_in
    try:
        spec.loader.exec_module(module)
    finally:
        if before is None:
            del sys.modules["transformers"]
        else:
            sys.modules["transformers"] = before
    return module


class _AutoConfig:
    @staticmethod
    def from_pretrained(name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(**BUILT_IN[Path(name).name])


class Original:
    """Its planner for one fleet: `demands` are LLaMAs by architecture name, `nodes` machines of 8 GPUs."""

    def __init__(self, module: Any, profile: Path, demands: list[Demand], nodes: int) -> None:
        self.module = module
        self.demands = demands
        with tempfile.TemporaryDirectory() as folder:
            fleet = Path(folder) / "models.yaml"
            fleet.write_text(
                yaml.safe_dump(
                    {
                        "cluster": {"nnodes": nodes, "ngpus_per_node": 8},
                        "models": [{"name": d.name, "model": d.architecture.name, "rate": d.rate} for d in demands],
                    }
                )
            )
            self.planner = module.PlacementOptimizer(str(fleet), str(profile))
        self.llms = [self.planner.models[d.name] for d in demands]
        self.rate = sum(d.rate for d in demands)

    def plan(self) -> tuple[float, float, dict[str, Any]]:
        """Its objective (rate-weighted throughput), the CPU seconds it took, and its placement."""
        began = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            found = self.planner.optimize(verbose=False, dump_to_yaml=False)
        seconds = time.process_time() - began
        return (0.0, seconds, {}) if found is None else (found["muxserve_tpt"], seconds, found)

    def fits(self, members: Members, size: int) -> bool:
        """Whether it would place these models on such a mesh, in some order."""
        llms = [self.llms[member.model] for member in members]
        shares = [llm.query_candidate_mps(size) for llm in llms]
        if any(share <= 0 for share in shares) or sum(shares) > 100 + _OVERLOAD:
            return False
        return sum(llm.model_size + _PER_MODEL for llm in llms) - _PER_MODEL <= _FREE * size

    def unit(self, members: Members, size: int) -> float:
        """The part of its objective that a mesh with these models adds."""
        llms = [self.llms[member.model] for member in members]
        shares = [llm.query_candidate_mps(size) for llm in llms]
        throughput, _, _ = self.planner.cost_estimator.estimate_mesh_throughput(
            self.module.MeshGroup(size), llms, shares
        )
        return float(throughput) * sum(llm.rate for llm in llms) / self.rate


class OriginalValues(Values):
    """Its objective and its rules, for our searches."""

    def __init__(self, estimator: Estimator, original: Original) -> None:
        super().__init__(estimator, Objective("throughput"))
        self.original = original

    def _best(self, mesh: Mesh, members: Members, thorough: bool = False) -> tuple[float, Shares | None]:
        if any(member.replicas > 1 for member in members) or not self.original.fits(members, mesh.size):
            return IMPOSSIBLE, None
        return self.original.unit(members, mesh.size), None


def units_of(plan: dict[str, Any]) -> dict[str, list[str]]:
    """Its placement, as mesh -> models."""
    return {name: sorted(models) for name, models in json.loads(json.dumps(plan)).items() if name.startswith("mesh")}

"""Which arrangement of prefill and decode `muxserve plan` would choose, in settings that differ in what matters: model,
devices, lengths, objectives.

    python benchmarks/choosing.py [--only NAME,NAME] [--out FILE]

Everything is simulated with the roofline's costs; nothing here ran on a GPU.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import NamedTuple

from report import machine, write_report

from muxserve.cli.plan_phases import comparison_document
from muxserve.costs.devices import device
from muxserve.costs.roofline import Roofline
from muxserve.planning.arrangements.base import Wanted
from muxserve.planning.checkpoints import planned_architecture
from muxserve.planning.comparison import compare
from muxserve.planning.device_pool import GpuPool
from placement.demand import Demand
from placement.memory import MemoryRules

ROOT = Path(__file__).resolve().parent.parent


class Setting(NamedTuple):
    """A model on GPUs: `nodes` has those of each machine. Lengths are means in tokens, objectives seconds."""

    model: str
    gpu: str
    nodes: tuple[int, ...]
    rate: float
    prompt: int
    output: int
    ttft: float
    tpot: float
    max_num_seqs: int = 256


SETTINGS = {
    "chat, 32B": Setting("qwen2.5-32b", "L20-48GB", (8,), 5.0, 280, 210, 5.0, 0.1),
    "chat, 32B, two machines": Setting("qwen2.5-32b", "L20-48GB", (4, 4), 5.0, 280, 210, 5.0, 0.1),
    "documents, 32B": Setting("qwen2.5-32b", "L20-48GB", (8,), 1.5, 2600, 76, 15.0, 0.1),
    "chat, 30B without grouped heads": Setting("llama-30b", "L20-48GB", (8,), 4.0, 280, 210, 5.0, 0.1),
    "chat, 30B, 16 GPUs": Setting("llama-30b", "A800-80GB", (8, 8), 30.0, 280, 210, 5.0, 0.1),
    "chat, 14B, 100 ms": Setting("qwen2.5-14b", "L20-48GB", (4,), 10.0, 220, 128, 2.0, 0.1, 1024),
    "chat, 14B, 200 ms": Setting("qwen2.5-14b", "L20-48GB", (4,), 10.0, 220, 128, 2.0, 0.2, 1024),
    "chat, 70B": Setting("llama-2-70b", "A100-80GB", (4,), 5.0, 280, 210, 2.0, 0.1),
    "chat, 8B": Setting("llama-3.1-8b", "A100-80GB", (2,), 12.0, 600, 300, 0.5, 0.05),
}


def run(name: str, setting: Setting) -> dict[str, object]:
    """Compare, print a line, and return all figures."""
    architecture = planned_architecture(setting.model, ROOT)
    demand = Demand(
        setting.model,
        architecture,
        architecture.dtype,
        setting.max_num_seqs,
        rate=setting.rate,
        prompt_tokens=setting.prompt,
        output_tokens=setting.output,
        slo_ttft=setting.ttft,
        slo_tpot=setting.tpot,
    )
    pool = GpuPool(setting.gpu, setting.nodes, device(setting.gpu).memory_bytes, MemoryRules.served(0.92))
    began = time.process_time()
    found = compare(Wanted(demand), pool, Roofline())
    seconds = time.process_time() - began
    cells = ", ".join(
        f"{each.phases} {each.figures.goodput:.2f} ({each.figures.layout.words})"
        if each.figures
        else f"{each.phases} -"
        for each in found.arrangements
    )
    print(f"{name}: {found.recommended}; {cells}; {seconds:.1f} s", flush=True)
    return {"setting": asdict_of(setting), **comparison_document(found), "processor_seconds": round(seconds, 1)}


def asdict_of(setting: Setting) -> dict[str, object]:
    """As JSON has it."""
    return {**setting._asdict(), "nodes": list(setting.nodes)}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of settings, with semicolons")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "choosing.json")
    given = parser.parse_args()
    report = json.loads(given.out.read_text()) if given.out.exists() else {}
    report["machine"] = machine()
    rows = report.setdefault("settings", {})
    for name in given.only.split(";") if given.only else SETTINGS:
        rows[name] = run(name, SETTINGS[name])
        write_report(given.out, report)


if __name__ == "__main__":
    main()

"""`muxserve doctor --ray`: the checks of `muxserve doctor` on every node of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from muxserve.cli.doctor import Check, all_checks, print_checks
from muxserve.cli.output import console, escape, print_error
from muxserve.cluster.ray_cluster import alive, ask_nodes, join
from muxserve.cluster.supervision import GaveUp


def doctor_nodes(address: str) -> int:
    """Print what each node can do; returns 1 if something needed is missing on one, or no cluster answers."""
    try:
        ray = join(address, start=False)
    except GaveUp as error:
        print_error(str(error))
        return 1
    nodes = {node["NodeID"]: node for node in alive(ray) if offers(node["Resources"])}
    if not nodes:
        print_error("no node of the cluster has CPUs for units (`ray start --num-cpus=...`)")
        return 1
    answers = ask_nodes(ray, list(nodes), examine)
    unable = [words_for(node) for name, node in nodes.items() if not _show(node, answers[name])]
    if unable:
        console.print(f"\n[bold red]units cannot be served there yet[/]: {escape(', '.join(unable))}")
        return 1
    console.print(f"\n[green]units can be served on {len(nodes)} node{'s' * (len(nodes) > 1)}[/]")
    return 0


def examine() -> bytes:
    """Runs on a node: its checks, as JSON."""
    # Ray hides GPUs from what does not ask for them.
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    return msgspec.json.encode(list(all_checks()))


def offers(resources: Mapping[str, float]) -> str:
    """What units can have of a node, in words; empty if it is nothing."""
    counts = ((resources.get(kind, 0.0), kind) for kind in ("CPU", "GPU"))
    return ", ".join(f"{count:g} {kind}{'s' * (count != 1)}" for count, kind in counts if count)


def words_for(node: Mapping[str, Any]) -> str:
    """A node for people."""
    return f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']})"


def _show(node: Mapping[str, Any], answer: bytes | str) -> bool:
    """Print what was found on a node; whether units can be served there."""
    console.print(f"\n[bold]{escape(words_for(node))}[/]: {offers(node['Resources'])} for units")
    if isinstance(answer, str):
        console.print(f"[bold red]cannot be asked[/]: {escape(answer)}")
        return False
    return not print_checks(msgspec.json.decode(answer, type=list[Check]))

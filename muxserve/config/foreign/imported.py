"""A fleet file of another gateway's file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import yaml

from muxserve.config.foreign import litellm, llama_swap
from muxserve.config.foreign.reading import KeyNote, Reading
from muxserve.config.problems import FleetError, Problem
from muxserve.config.source import parse_yaml

Program = Literal["llama-swap", "LiteLLM"]


@dataclass(frozen=True)
class Imported:
    """What came of a file: the fleet file's text, empty if no model could be taken; what became of each key."""

    program: Program
    text: str
    models: list[str]
    notes: list[KeyNote]


def import_file(text: str, file: str, environ: Mapping[str, str]) -> Imported:
    """Read a configuration file of llama-swap or LiteLLM.

    Raises:
        FleetError: it is neither.
    """
    source = parse_yaml(text, file)
    data = source.data if isinstance(source.data, dict) else {}
    if isinstance(data.get("model_list"), list):
        reading = Reading(source, litellm.REASONS)
        program: Program = "LiteLLM"
        fleet = litellm.read_litellm(reading)
    elif isinstance(data.get("models"), dict):
        reading = Reading(source, llama_swap.REASONS)
        program = "llama-swap"
        fleet = llama_swap.read_llama_swap(reading, environ)
    elif isinstance(data.get("models"), list):
        raise FleetError(
            [source.problem(("models",), "is a list, as in a fleet file; `muxserve validate` reads those")]
        )
    else:
        message = "has neither `models` with a command each (llama-swap) nor a `model_list` (LiteLLM)"
        raise FleetError([Problem(message, file)])
    names = [model["name"] for model in reading.models]
    written = yaml.safe_dump({**fleet, "models": reading.models}, sort_keys=False, allow_unicode=True, width=120)
    head = f"# yaml-language-server: $schema=fleet.schema.json\n# What `muxserve import` took of {file}.\n"
    if "cluster" not in fleet:
        head += "# On CPUs; on GPUs say how many: cluster: { gpus: 1 }\n"
    return Imported(program, head + written if names else "", names, reading.notes())

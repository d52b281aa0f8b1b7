"""The fleet file's JSON schema, for editors (`# yaml-language-server: $schema=...`)."""

from __future__ import annotations

import json
from typing import Any

from muxserve.config.schema import Fleet


def fleet_schema() -> dict[str, Any]:
    """The schema as plain data (draft 2020-12)."""
    schema = Fleet.model_json_schema()
    cluster = schema["properties"]["cluster"]
    # A mapping, or the word that stands for an empty one.
    reference = cluster.pop("$ref")
    cluster["anyOf"] = [{"const": "auto"}, {"$ref": reference}]
    model = schema["$defs"]["Model"]
    model["anyOf"] = [{"required": ["path"]}, {"required": ["hub"]}, {"required": ["architecture"]}]
    model["not"] = {"required": ["path", "hub"]}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "MuxServe fleet file",
        **{key: value for key, value in schema.items() if key != "title"},
    }


def fleet_schema_text() -> str:
    """The schema as committed to configs/fleet.schema.json."""
    return json.dumps(fleet_schema(), indent=2, sort_keys=False) + "\n"

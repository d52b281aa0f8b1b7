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
    # As one writes it, not in bytes per second.
    cluster["default"]["network"] = schema["$defs"]["Cluster"]["properties"]["network"]["default"]
    model = schema["$defs"]["Model"]
    # A mapping, or what stands for one.
    replicas = model["properties"]["replicas"]
    replicas["anyOf"] = [{"type": "integer", "minimum": 1}, {"$ref": replicas.pop("$ref")}]
    replicas["default"] = 1
    keys = schema["$defs"]["Gateway"]["properties"]["api_keys"]
    key = {"anyOf": [{"type": "string", "minLength": 1}, keys.pop("items")]}
    del keys["type"]
    keys["anyOf"] = [*key["anyOf"], {"type": "array", "items": key}]
    migration = schema["properties"]["migration"]
    migration["anyOf"] = [{"enum": ["on", "off", True, False]}, migration["anyOf"][0]]
    watchdog = schema["properties"]["watchdog"]
    watchdog["anyOf"] = [{"enum": ["on", "off", True, False]}, watchdog["anyOf"][0]]
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

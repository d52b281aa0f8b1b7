"""Reads a fleet file and turns every mistake in it into a sentence with file, line and key."""

from __future__ import annotations

import json
import os
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from muxserve.config.checks import check, resolve
from muxserve.config.include import DEFAULTS, parse_whole, spread_defaults
from muxserve.config.problems import (
    MOST_PROBLEMS,
    FleetError,
    KeyPath,
    Problem,
    closest,
    did_you_mean,
    format_path,
    shown,
)
from muxserve.config.removed import removed_key
from muxserve.config.schema import Fleet, ModelSettings
from muxserve.config.source import Source, is_extension, read_text
from muxserve.config.values import ALIAS_PATTERN, plain_name
from muxserve.config.variables import fill_in

_KINDS = {
    "string_type": "a text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def load_fleet(
    path: str | os.PathLike[str], environ: Mapping[str, str] | None = None, *, serving: bool = True
) -> Fleet:
    """Read and check a fleet file.

    Paths in it are relative to the file; `env:NAME` is looked up in `environ` (the process's own by default).
    Without `serving`, for planning and simulating, models need no weights and the gateway no keys.

    Raises:
        FleetError: with every mistake found.
    """
    text = read_text(path, "fleet file")
    return parse_fleet(text, str(path), Path(path).parent, environ, serving=serving)


def parse_fleet(
    text: str,
    file: str,
    base: Path,
    environ: Mapping[str, str] | None = None,
    *,
    serving: bool = True,
    others: Mapping[str, object] | None = None,
    local: bool = True,
) -> Fleet:
    """Like `load_fleet`, for text; paths in it are relative to `base`. `others` are keys of the fleet that its models
    are to join, which the text has not. A `local` text may include files, and name variables of `environ` in paths."""
    environ = os.environ if environ is None else environ
    source = parse_whole(text, file, base, environ, local)
    if not isinstance(source.data, dict):
        raise FleetError([Problem(f"must be a mapping with `models:`, not {_a(source.data)}", file, 1)])
    source.data = {**(others or {}), **source.data}
    spread_defaults(source, frozenset(ModelSettings.model_fields))
    problems = list(fill_in(source, environ, local))
    unfilled = {(problem.file, problem.path) for problem in problems}
    problems += [each for each in check(source, base, environ, serving) if (each.file, each.path) not in unfilled]
    fleet = None
    try:
        fleet = Fleet.model_validate({key: of for key, of in source.data.items() if not is_extension(key)})
    except ValidationError as error:
        # Where a value has the wrong type altogether, the checks above stay silent and this speaks.
        said = {(problem.file, problem.path) for problem in problems}
        for problem in problems_of(source, error, Fleet):
            if (problem.file, problem.path) not in said:
                problems.append(problem)
                if problem.path[:1] == (DEFAULTS,):  # each model has the mistake, and it is one
                    said.add((problem.file, problem.path))
    if problems or fleet is None:
        raise FleetError(problems)
    fleet = resolve(fleet, base, environ)
    fleet._source = source
    fleet._places = {model.name: index for index, model in enumerate(fleet.models)}
    return fleet


def problems_of(source: Source, error: ValidationError, root: type[BaseModel]) -> list[Problem]:
    """What pydantic found wrong with a file that should be a `root`, as sentences with their places."""
    # Hints take time to find, and nobody reads those of problems that are not shown.
    return [
        _problem(source, details, root, hints=number < MOST_PROBLEMS) for number, details in enumerate(error.errors())
    ]


def _problem(source: Source, details: ErrorDetails, root: type[BaseModel], hints: bool) -> Problem:
    # pydantic marks a wrong key of a mapping with a last part of its own.
    path: KeyPath = tuple(part for part in details["loc"] if part != "[key]")
    if len(path) < len(details["loc"]):
        path = (*path[:-1], str(path[-1]))
    return source.problem(path, _message(path, details, root, hints))


def _message(path: KeyPath, details: ErrorDetails, root: type[BaseModel], hints: bool) -> str:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return removed_key(path) or (_unknown_key(path, root) if hints else "unknown key")
    if kind == "missing":
        return "is required"
    if kind == "value_error":
        return str(context["error"])
    if kind == "literal_error":
        allowed = [part.strip().strip("'") for part in str(context["expected"]).replace(" or ", ", ").split(",")]
        hint = closest(value, allowed) if isinstance(value, str) else None
        wrong = f"must be one of {', '.join(filter(None, allowed))}, not {shown(value)}"
        return f'{wrong}; did you mean "{hint}"?' if hint else wrong
    if kind == "string_pattern_mismatch" and (
        path[-1] == "name" or (path[0] in ("priorities", "tenants") and "keys" not in path)
    ):
        words = "must be letters, digits, '.', '_' and '-' only, at most 64, starting with a letter or digit"
        return f"{words}: {shown(value)}{_alias_hint(value) if path[0] == 'models' else ''}"
    if kind == "string_pattern_mismatch" and (
        ("tenants" in path and "keys" in path) or path[-2:] == ("fallback", "key")
    ):
        return 'must say where the key is, "env:NAME" or "file:PATH", and never be the key itself'
    if kind == "string_pattern_mismatch" and "aliases" in path:
        return f"must be letters, digits, '.', '_', ':', '/' and '-' only, at most 128: {shown(value)}"
    if kind == "string_pattern_mismatch" and path[-2:] == ("fallback", "url"):
        return f'must be the URL of an OpenAI endpoint, such as "https://api.example.com/v1", not {shown(value)}'
    if kind == "string_pattern_mismatch" and "cors_origins" in path:
        return f'must be "*" or an origin such as "https://chat.example.org", without a path, not {shown(value)}'
    if kind == "string_pattern_mismatch" and path[-1] == "hub":
        return f"must be a hub id such as org/name, not {shown(value)}; a local directory goes under `path`"
    if kind == "too_long":
        return f"has {context['actual_length']:,} entries, and may have {context['max_length']:,}"
    if kind == "too_short":
        return "needs at least one entry"
    if kind == "string_too_short":
        return "must not be empty"
    if kind == "finite_number":
        return f"must be a finite number, not {shown(value)}"
    bounds = {"greater_than": ("gt", "more than"), "greater_than_equal": ("ge", "at least")}
    bounds |= {"less_than": ("lt", "less than"), "less_than_equal": ("le", "at most")}
    if kind in bounds:
        key, words = bounds[kind]
        return f"must be {words} {context[key]:g}, not {shown(value)}"
    if kind == "string_type" and isinstance(value, bool):
        return "is a text that YAML takes for true or false (as yes, no, on and off are): put it in quotes"
    if kind in _KINDS:
        return f"must be {_KINDS[kind]}, not {_a(value)}"
    return details["msg"]


def _alias_hint(value: object) -> str:
    """What to write for a name that only aliases can be, such as org/name or name:tag."""
    if not isinstance(value, str) or not re.match(ALIAS_PATTERN, value):
        return ""
    name = plain_name(value)
    return f"; write `name: {name}`, and `aliases: [{value}]` for clients that ask for it so" if name else ""


def _unknown_key(path: KeyPath, root: type[BaseModel]) -> str:
    """`unknown key`, with the key that was probably meant, here or elsewhere in the file's schema."""
    key = str(path[-1])
    at = _section_at(path[:-1], root)
    here = list(at.model_fields)
    elsewhere = [(place, list(section.model_fields)) for place, section in _sections(root, "") if section is not at]
    found = next(((place, key) for place, keys in elsewhere if key in keys), None)
    if found is None and closest(key, here) is None:
        found = next(((place, near) for place, keys in elsewhere if (near := closest(key, keys))), None)
    if found is not None:
        place, near = found
        return f"unknown key; `{near}` belongs " + (f"under `{place}`" if place else "at the top")
    return f"unknown key{did_you_mean(key, here)}"


def _section_at(path: KeyPath, root: type[BaseModel]) -> type[BaseModel]:
    section = root
    for part in path:
        if isinstance(part, str) and part in section.model_fields:
            section = _section_of(section.model_fields[part].annotation) or section
    return section


def _section_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (list, dict, typing.Union, types.UnionType, typing.Annotated):
        return next(filter(None, map(_section_of, typing.get_args(annotation))), None)
    return None


def _sections(section: type[BaseModel], place: str) -> list[tuple[str, type[BaseModel]]]:
    found = [(place, section)]
    for name, field in section.model_fields.items():
        inner = _section_of(field.annotation)
        if inner is not None:
            found += _sections(inner, format_path((*place.split("."), name) if place else (name,)))
    return found


def _a(value: object) -> str:
    """`value` as the user sees its kind."""
    if value is None:
        return "empty"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"the text {shown(value)}" if isinstance(value, str) else shown(value)


def fleet_schema() -> dict[str, Any]:
    """The schema as plain data (draft 2020-12)."""
    schema = Fleet.model_json_schema()
    schema["patternProperties"] = {"^x-": {}}
    cluster = schema["properties"]["cluster"]
    # A mapping, or the word that stands for an empty one.
    reference = cluster.pop("$ref")
    cluster["anyOf"] = [{"const": "auto"}, {"$ref": reference}]
    # As one writes it, not in bytes per second.
    cluster["default"]["network"] = schema["$defs"]["ClusterSection"]["properties"]["network"]["default"]
    model = schema["$defs"]["Model"]
    # A mapping, or what stands for one.
    replicas = model["properties"]["replicas"]
    replicas["anyOf"] = [{"type": "integer", "minimum": 1}, {"$ref": replicas.pop("$ref")}]
    replicas["default"] = 1
    keys = schema["$defs"]["GatewaySection"]["properties"]["api_keys"]
    key = {"anyOf": [{"type": "string", "minLength": 1}, keys.pop("items")]}
    del keys["type"]
    keys["anyOf"] = [*key["anyOf"], {"type": "array", "items": key}]
    migration = schema["properties"]["migration"]
    migration["anyOf"] = [{"enum": ["on", "off", True, False]}, migration["anyOf"][0]]
    # What every model has to say, `model_defaults` cannot; else they have the same keys.
    schema["properties"]["models"]["items"] |= {
        "required": model.pop("required"),
        "anyOf": [{"required": ["path"]}, {"required": ["hub"]}, {"required": ["architecture"]}],
        "not": {"required": ["path", "hub"]},
    }
    del schema["$defs"]["ModelSettings"]
    own = [key for key in model["properties"] if key not in ModelSettings.model_fields]
    defaults = schema["properties"]["model_defaults"]
    defaults |= {"$ref": "#/$defs/Model", "properties": dict.fromkeys(own, False)}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "MuxServe fleet file",
        **{key: value for key, value in schema.items() if key != "title"},
    }


def fleet_schema_text() -> str:
    """The schema as committed to configs/fleet.schema.json."""
    return json.dumps(fleet_schema(), indent=2, sort_keys=False) + "\n"

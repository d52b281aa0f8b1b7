"""How large a grammar of a request is, before any compiler sees it: bytes as sent, nesting, and elements with all
repetitions written out.

Pure, and linear in the size of the text. It counts and does not judge: the compiler refuses invalid schemas, regexes
and grammars. References count as one element, since compilers share what they refer to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muxserve.spec import GrammarLimits

# Beyond any limit; keeps the products of absurd numbers small.
MOST_ELEMENTS = 10**18
# The fields of a structured output that hold a grammar.
KINDS = ("json", "regex", "choice", "grammar", "structural_tag")

_SCHEMAS_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
_ITEMS = frozenset({"items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"})
_MEMBERS = frozenset({"additionalProperties", "unevaluatedProperties", "patternProperties", "propertyNames"})
_DATA = frozenset({"enum", "const", "default", "examples"})
# What is not closed reaches to its end: a search for the end that fails must not begin anew at each character.
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{}]', re.DOTALL)
_COUNTS = re.compile(r"\{\s?(\d*)\s?(?:,\s?(\d*)\s?)?\}")
_REGEX = re.compile(
    r"\\.|(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\]?)|(?P<count>\{\s?\d*\s?(?:,\s?\d*\s?)?\})|[()|*+?]|.", re.DOTALL
)
_EBNF = re.compile(
    r'(?P<text>"(?:[^"\\\n]|\\.)*"?|\'(?:[^\'\\\n]|\\.)*\'?)|(?P<note>(?:#|//)[^\n]*)|(?P<regex>/(?:[^/\\\n]|\\.)+/?)'
    r"|(?P<set>\[\^?\]?(?:\\.|[^\]\\\n])*\]?)|(?P<count>\{\s?\d*\s?(?:,\s?\d*\s?)?\}|~\s?\d+(?:\s?\.\.\s?\d+)?)"
    r"|(?P<sign>[()])|(?P<name>[\w.$-]+)|(?P<rest>.)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class GrammarSize:
    """What a grammar measures: bytes of UTF-8, levels of nesting, elements with all repetitions written out."""

    bytes: int
    depth: int
    elements: int


def refusal(structured: Mapping[str, Any], limits: GrammarLimits) -> str | None:
    """Why the grammar in the fields of a structured output is too large; None if it is not."""
    for kind in KINDS:
        spec = structured.get(kind)
        if spec is None:
            continue
        size = measure(kind, spec, limits)
        if size.bytes > limits.max_bytes:
            return f"the {_name(kind)} has {size.bytes} bytes; this server takes at most {limits.max_bytes}"
        if size.depth > limits.max_depth:
            return (
                f"the {_name(kind)} is nested too deeply: {size.depth} levels; this server takes at most "
                f"{limits.max_depth}"
            )
        if size.elements > limits.max_expansion:
            return (
                f"the {_name(kind)} expands to {_shown(size.elements)} elements with all its repetitions written out; "
                f"this server takes at most {limits.max_expansion}"
            )
    return None


def measure(kind: str, spec: Any, limits: GrammarLimits) -> GrammarSize:
    """The size of one grammar; counting stops where a limit of bytes or depth is passed.

    Args:
        kind: one of `KINDS`.
        spec: as the request has it: text, for `json` also the schema, for `choice` the list.
        limits: where to stop.
    """
    if kind == "choice":
        choices = [str(choice) for choice in spec]
        size = sum(_bytes(choice) for choice in choices)
        return GrammarSize(size, 1, size + len(choices))
    if kind == "regex":
        size = _bytes(spec)
        return GrammarSize(size, 0, 0) if size > limits.max_bytes else GrammarSize(size, *_regex(spec))
    if kind == "grammar":
        size = _bytes(spec)
        return GrammarSize(size, 0, 0) if size > limits.max_bytes else GrammarSize(size, *_ebnf(spec))
    return _json(spec, limits)


def _name(kind: str) -> str:
    return {"json": "JSON schema", "choice": "list of choices", "structural_tag": "structural tag"}.get(kind, kind)


def _shown(elements: int) -> str:
    return str(elements) if elements < MOST_ELEMENTS else f"more than {MOST_ELEMENTS:.0e}"


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


# ---------------------------------------------------------------- JSON schemas


def _json(spec: Any, limits: GrammarLimits) -> GrammarSize:
    if isinstance(spec, str):
        size, depth = _bytes(spec), 0
        if size <= limits.max_bytes:
            depth = _text_depth(spec)
        if size > limits.max_bytes or depth > limits.max_depth:
            return GrammarSize(size, depth, 0)
        try:
            spec = json.loads(spec)
        except ValueError:
            return GrammarSize(size, depth, 0)
    else:
        size, depth = _weight(spec, limits)
        if size > limits.max_bytes or depth > limits.max_depth:
            return GrammarSize(size, depth, 0)
    return GrammarSize(size, depth, min(_schema(spec), MOST_ELEMENTS))


def _text_depth(text: str) -> int:
    level = deepest = 0
    for found in _BRACKETS.finditer(text):
        match found.group()[0]:
            case "[" | "{":
                level += 1
                deepest = max(deepest, level)
            case "]" | "}":
                level -= 1
    return deepest


def _weight(value: Any, limits: GrammarLimits) -> tuple[int, int]:
    """Bytes as compact JSON, within a few per cent, and depth; without recursion."""
    size = deepest = 0
    left = [(value, 1)]
    while left and size <= limits.max_bytes and deepest <= limits.max_depth:
        each, level = left.pop()
        if isinstance(each, dict):
            deepest = max(deepest, level)
            size += 2 + sum(_bytes(str(key)) + 4 for key in each)
            left.extend((inner, level + 1) for inner in each.values())
        elif isinstance(each, list):
            deepest = max(deepest, level)
            size += 2 + len(each)
            left.extend((inner, level + 1) for inner in each)
        else:
            size += _bytes(each) + 2 if isinstance(each, str) else 4
    return size, deepest


def _schema(value: Any) -> int:
    """Elements of a schema, or of what may hold schemas."""
    if isinstance(value, list):
        return min(sum(_schema(each) for each in value), MOST_ELEMENTS)
    if not isinstance(value, dict):
        return 1
    total = 1 + _number(value, "minLength", "maxLength")
    items = max(_number(value, "minItems", "maxItems"), 1)
    members = max(_number(value, "minProperties", "maxProperties"), 1)
    for key, inner in value.items():
        if key in _DATA:
            size = _data(inner)
        elif key == "pattern" and isinstance(inner, str):
            size = _regex(inner)[1]
        elif key in _SCHEMAS_BY_NAME and isinstance(inner, dict):
            size = sum(len(str(name)) + _schema(each) for name, each in inner.items())
            if key == "patternProperties":
                size += sum(_regex(str(pattern))[1] for pattern in inner)
            elif key == "properties":
                # After each that may be left out, every later one may come.
                required = value.get("required")
                optional = len(inner) - (len(required) if isinstance(required, list) else 0)
                size += max(optional, 0) ** 2 // 2
        else:
            size = _schema(inner)
        if key in _ITEMS:
            size *= items
        if key in _MEMBERS:
            size *= members
        total += size
    return min(total, MOST_ELEMENTS)


def _data(value: Any) -> int:
    """Elements of a constant."""
    if isinstance(value, dict):
        return 1 + sum(len(str(key)) + _data(each) for key, each in value.items())
    if isinstance(value, list):
        return 1 + sum(_data(each) for each in value)
    return 1 + len(value) if isinstance(value, str) else 1


def _number(schema: dict[str, Any], *keys: str) -> int:
    """The largest of these numbers; 0 if there is none."""
    found = [schema[key] for key in keys if isinstance(schema.get(key), (int, float))]
    return max((_capped(each) for each in found), default=0)


def _capped(number: float) -> int:
    return int(number) if 0 < number < MOST_ELEMENTS else (MOST_ELEMENTS if number > 0 else 0)


# ---------------------------------------------------------------- regexes and EBNF


class _Count:
    """Counts the elements of a text of atoms, groups and repetitions that is read from left to right."""

    def __init__(self) -> None:
        self.deepest = 0
        # For each open group: its elements so far, and those of its last atom, which a repetition concerns.
        self._groups = [[0, 0]]

    def atom(self, elements: int) -> None:
        group = self._groups[-1]
        group[0] += group[1]
        group[1] = elements

    def open(self) -> None:
        self._groups.append([0, 0])
        self.deepest = max(self.deepest, len(self._groups) - 1)

    def close(self) -> None:
        if len(self._groups) > 1:
            self.atom(min(sum(self._groups.pop()) + 1, MOST_ELEMENTS))

    def repeat(self, times: int) -> None:
        group = self._groups[-1]
        group[1] = min(group[1] * max(times, 1), MOST_ELEMENTS)

    def total(self) -> int:
        while len(self._groups) > 1:
            self.close()
        return min(sum(self._groups[0]), MOST_ELEMENTS)


def _regex(pattern: str) -> tuple[int, int]:
    """Depth and elements."""
    count = _Count()
    for found in _REGEX.finditer(pattern):
        text = found.group()
        if text == "(":
            count.open()
        elif text == ")":
            count.close()
        elif found.lastgroup == "count":
            count.repeat(_times(text))
        elif text not in ("|", "*", "+", "?"):
            count.atom(1)
    return count.deepest, count.total()


def _ebnf(grammar: str) -> tuple[int, int]:
    """Depth and elements of EBNF as xgrammar has it, and of Lark's."""
    count = _Count()
    for found in _EBNF.finditer(grammar):
        text = found.group()
        match found.lastgroup:
            case "text":
                count.atom(len(text) - 1)
            case "regex":
                count.atom(_regex(text[1:])[1])
            case "set" | "name":
                count.atom(1)
            case "sign":
                (count.open if text == "(" else count.close)()
            case "count":
                count.repeat(_times(text))
    return count.deepest, count.total()


def _times(text: str) -> int:
    """The larger number of `{3}`, `{3,}`, `{3,7}`, `~3` and `~3..7`."""
    if text[0] == "~":
        return max(_digits(each) for each in text[1:].split(".."))
    found = _COUNTS.fullmatch(text)
    assert found is not None
    return max((_digits(each) for each in found.groups() if each), default=1)


def _digits(text: str) -> int:
    digits = text.strip().lstrip("0")
    return MOST_ELEMENTS if len(digits) > 18 else int(digits or "0")

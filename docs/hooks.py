"""Hooks of mkdocs: the repository's files that pages link to become part of the site.

A page links to `../benchmarks/results/x.json` as it must for a reader of the repository. The site gets a copy of each
such file below `repository/`, and the files of `ROOT_PAGES` as pages.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
# Links and pictures: [text](target#anchor)
LINK = re.compile(r"(\]\()([^)#\s]+)")


def outside(target: str) -> str | None:
    """The path below the repository's root of what a page of docs/ links to as `../PATH`; None for other links."""
    return target.removeprefix("../") if target.startswith("../") else None


def on_files(files: Files, config: Any) -> Files:
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, content=at_home((ROOT / name).read_text())))
    wanted = {
        path
        for page in list(files.documentation_pages())
        for _, target in LINK.findall(page.content_string)
        if (path := outside(target)) and path not in ROOT_PAGES
    }
    for path in sorted(wanted):
        if (ROOT / path).is_file():
            files.append(File.generated(config, f"repository/{path}", abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    def moved(match: re.Match[str]) -> str:
        path = outside(match[2])
        if path is None:
            return match[0]
        return match[1] + (path if path in ROOT_PAGES else posixpath.join("repository", path))

    return LINK.sub(moved, markdown)


def at_home(markdown: str) -> str:
    """A page of the repository's root as if it lay in docs/."""

    def moved(match: re.Match[str]) -> str:
        target = match[2]
        if "://" in target or target in ROOT_PAGES:
            return match[0]
        return match[1] + (target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}")

    return LINK.sub(moved, markdown)

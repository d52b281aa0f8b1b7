"""Links in the documentation lead somewhere, and every page is in the navigation of the site."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from muxserve.config.loader import parse_fleet
from tests.support import model_table

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*DOCS, *sorted(ROOT.glob("*.md"))]
FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """The ids that a page's headings get, as Python-Markdown's table of contents makes them."""
    found: set[str] = set()
    for heading in HEADING.findall(FENCE.sub("", page.read_text())):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())
        unique, number = name, 0
        while unique in found:
            number += 1
            unique = f"{name}_{number}"
        found.add(unique)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for target in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    assert not dead, f"dead links in {page.name}: {', '.join(dead)}"


def test_every_page_is_in_the_navigation() -> None:
    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        values = entry.values() if isinstance(entry, dict) else entry
        return [page for value in values for page in pages(value)]  # type: ignore[attr-defined]

    listed = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert len(listed) == len(set(listed))
    expected = {page.name for page in DOCS} | {"CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"}
    assert set(listed) == expected


# What a newcomer reads first. The rule is CONTRIBUTING.md's; reference pages come as close as their subject lets them.
GUIDE = ["README.md", "SECURITY.md", "docs/index.md", "docs/first-fleet.md", "docs/capacity-planning.md",
         "docs/operating.md", "docs/troubleshooting.md"]  # fmt: skip
LONGEST = 25


def sentences(markdown: str) -> list[str]:
    """Sentences of the running text: no code, tables, headings and pictures; items of lists stand alone."""
    lines = FENCE.sub("", markdown).splitlines()
    text = "\n".join("" if line.startswith(("|", "#", "    ", "!")) else line for line in lines)
    text = re.sub(r"\n\s*(?:[-*]|\d+\.) ", "\n\n", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))
    paragraphs = (" ".join(block.split()) for block in text.split("\n\n"))
    return [each for block in paragraphs for each in re.split(r"(?<=[.!?:;])\s+", block) if each]


@pytest.mark.parametrize("name", GUIDE)
def test_the_guide_has_short_sentences(name: str) -> None:
    long = [each for each in sentences((ROOT / name).read_text()) if len(each.split()) > LONGEST]
    assert not long, f"more than {LONGEST} words:\n" + "\n".join(long)


# What proselint is not asked for: Markdown's quotes and signs are those of code; columns of tables look like words that
# are written twice; "But" may begin a paragraph; and single words ("very", "for ever") are matters of taste.
UNASKED = ("typography", "lexical_illusions", "dates_times", "misc.but", "weasel_words", "archaism")
TOOLS = ROOT / "build/shipping"


@pytest.mark.slow
@pytest.mark.skipif(not (TOOLS / "proselint").exists(), reason="no proselint: see requirements/shipping.txt")
def test_prose_is_free_of_what_a_linter_finds(tmp_path: Path) -> None:
    config = tmp_path / "proselint.json"
    config.write_text(json.dumps({"checks": dict.fromkeys(UNASKED, False)}))
    linter = [sys.executable, "-m", "proselint", "check", "--config", str(config)]
    environment = {**os.environ, "PYTHONPATH": str(TOOLS)}
    done = subprocess.run([*linter, *map(str, PAGES)], capture_output=True, text=True, env=environment)
    found = [line for line in done.stdout.splitlines() if "CHANGELOG" not in line]
    assert not found, "\n".join(found)
    (tmp_path / "bad.md").write_text("It is a very unique and completely finished thing, at the end of the day.\n")
    bad = subprocess.run([*linter, str(tmp_path / "bad.md")], capture_output=True, text=True, env=environment)
    assert "uncomparables" in bad.stdout, bad.stdout + bad.stderr


@pytest.mark.parametrize("name", ["README.md", "docs/first-fleet.md"])
def test_a_newcomer_can_save_the_fleet_files_in_the_repository(name: str) -> None:
    files = re.findall(r"^```yaml\n(.*?)^```", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)
    assert files
    for text in files:
        assert parse_fleet(text, "fleet.yaml", ROOT).models


@pytest.mark.slow
def test_the_table_of_models_claims_what_tests_show() -> None:
    text = model_table.PAGE.read_text()
    assert text == model_table.page(text), "run: python -m tests.support.model_table"


def test_a_mark_must_name_columns_of_the_table(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text("@pytest.mark.serves('Llama', 'flies')\ndef test_x(): ...\n")
    with pytest.raises(ValueError, match=r"test_x.py:1: give an architecture and some of served"):
        model_table.shown(tmp_path)

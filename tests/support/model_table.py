"""The table of docs/models.md, from the tests that show what it claims: `python -m tests.support.model_table`.

A test that shows something of an architecture says so: `@pytest.mark.serves("Qwen3", "prefix cache")`. The names after
the architecture are columns of the table. They are read from the source text, without importing the tests.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from pathlib import Path

from muxserve.vllm.syntax import parse

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- begin: tests/support/model_table.py -->", "<!-- end -->"
# A request of its own is served with stock vLLM's tokens; the checkpoint's weights are quantised; requests move between
# units with the same tokens; prefixes are found in the cache; the KV cache is kept in FP8.
COLUMNS = ("served", "quantised", "migrates", "prefix cache", "FP8 KV cache")

Shown = dict[str, dict[str, set[Path]]]


def shown(tests: Path = ROOT / "tests") -> Shown:
    """Architecture -> column -> the files of tests that show it.

    Raises:
        ValueError: a mark has no architecture, or names a column that the table does not have.
    """
    found: Shown = defaultdict(lambda: defaultdict(set))
    for file in sorted(tests.rglob("*.py")):
        for node in ast.walk(parse(file)):
            if not (isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.serves"):
                continue
            names = [each.value for each in node.args if isinstance(each, ast.Constant)]
            architecture, *columns = [str(name) for name in names] or [""]
            if not architecture or not columns or len(names) != len(node.args) or set(columns) - set(COLUMNS):
                raise ValueError(f"{file}:{node.lineno}: give an architecture and some of {', '.join(COLUMNS)}")
            for column in columns:
                found[architecture][column].add(file)
    return found


def table(found: Shown) -> str:
    """As Markdown, with links from docs/ to the tests."""
    lines = [f"| architecture | {' | '.join(COLUMNS)} | GPU | tests (CPU) |", "|---" * (len(COLUMNS) + 3) + "|"]
    for architecture in sorted(found):
        columns = found[architecture]
        cells = ["yes" if columns[column] else "not tested" for column in COLUMNS]
        files = sorted({file for files in columns.values() for file in files})
        links = ", ".join(f"[{file.stem}](../{file.relative_to(ROOT)})" for file in files)
        lines.append(f"| {architecture} | {' | '.join(cells)} | not tried | {links} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """The page `text` with the table of today's tests."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(shown())}\n{END}{after}"


def main() -> int:
    """Write the table into the page."""
    PAGE.write_text(page(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

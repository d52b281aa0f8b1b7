"""Syntax trees of Python sources that are read without importing them."""

from __future__ import annotations

import ast
import gc
from pathlib import Path


def parse(path: Path) -> ast.Module:
    """The syntax tree of a file.

    Before 3.11.8, CPython counts the depth of all trees under construction in one place. A collection of garbage may
    run code that builds another tree meanwhile, as the log of a task's exception that nobody awaited does. The first
    then fails with "SystemError: AST constructor recursion depth mismatch" (python/cpython#106905).
    So none is collected here.

    Raises:
        OSError: the file cannot be read.
        SyntaxError: it is not Python.
    """
    source = path.read_bytes()
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        if collects:
            gc.enable()

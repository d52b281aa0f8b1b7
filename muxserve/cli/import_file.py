"""`muxserve import`: the configuration file of another gateway as a fleet file."""

from __future__ import annotations

import os
from pathlib import Path

from muxserve.cli.output import console, escape, print_error, print_problems
from muxserve.config import FleetError, parse_fleet
from muxserve.config.foreign.imported import import_file
from muxserve.config.source import read_text
from muxserve.net.exit_codes import ExitCode
from placement.format import enumerate_words


def run(file: Path, out: Path) -> int:
    """Write `out` from `file`, and say of each key what became of it; returns the exit code."""
    if out.exists():
        print_error(f"{out} is there already; name another file with -o, or remove it")
        return ExitCode.WRONG
    try:
        imported = import_file(read_text(file, "configuration file"), str(file), os.environ)
    except FleetError as error:
        print_problems(error, "nothing was written")
        return ExitCode.WRONG
    for note in imported.notes:
        became = f"[green]{escape(note.words)}[/]" if note.taken else f"[yellow]not taken:[/] {escape(note.words)}"
        console.print(f"{escape(f'{file}:{note.line}: {note.key}')}: {became}")
    if not imported.models:
        print_error(f"no model of this {imported.program} file can be served here; nothing was written")
        return ExitCode.WRONG
    try:
        out.write_text(imported.text)
    except OSError as error:
        print_error(f"{out} cannot be written: {error.strerror}")
        return ExitCode.WRONG
    count = f"{len(imported.models)} model{'' if len(imported.models) == 1 else 's'}"
    console.print(f"{escape(str(out))} has {count} of this {imported.program} file: {enumerate_words(imported.models)}")
    try:
        parse_fleet(imported.text, str(out), out.parent)
    except FleetError as error:
        print_problems(error, f"see to that, then: muxserve validate {out}")
        return ExitCode.NO
    console.print(f"next: muxserve schema > {escape(str(out.parent / 'fleet.schema.json'))}, muxserve validate {out}")
    return ExitCode.DONE

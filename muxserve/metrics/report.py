"""Reports of one or several runs: stable JSON here, tables and a page with plots from the modules beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from muxserve.metrics.html_report import report_page
from muxserve.metrics.page import write_page
from muxserve.metrics.summary import Summary
from muxserve.metrics.tables import comparison_table, models_table

__all__ = [
    "Report",
    "ReportError",
    "comparison_table",
    "models_table",
    "read_json",
    "report_page",
    "to_json",
    "write_json",
    "write_page",
]
VERSION = 1


class ReportError(ValueError):
    """A file that is no report; the message names the file and says why."""


class Report(msgspec.Struct, kw_only=True):
    """What a report file holds: named runs of one workload. `about` says in words what was run, `parameters` with what.
    Fields are only ever added; a change of meaning raises the version."""

    muxserve_report: int = VERSION
    about: str = ""
    parameters: dict[str, object] = {}
    runs: dict[str, Summary]


def to_json(runs: Mapping[str, Summary], *, about: str = "", parameters: Mapping[str, object] | None = None) -> bytes:
    """The report as indented JSON, ending in a newline."""
    report = Report(about=about, parameters=dict(parameters or {}), runs=dict(runs))
    return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"


def write_json(
    path: str | os.PathLike[str],
    runs: Mapping[str, Summary],
    *,
    about: str = "",
    parameters: Mapping[str, object] | None = None,
) -> None:
    """Write `to_json` to a file.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_bytes(to_json(runs, about=about, parameters=parameters))


def read_json(path: str | os.PathLike[str]) -> Report:
    """A report written by `write_json`.

    Raises:
        ReportError: the file holds something else.
        OSError: the file cannot be read.
    """
    try:
        report = msgspec.json.decode(Path(path).read_bytes(), type=Report)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReportError(f"{os.fspath(path)} is not a MuxServe report: {error}") from None
    if report.muxserve_report != VERSION:
        raise ReportError(
            f"{os.fspath(path)}: report version {report.muxserve_report} is not known, this reader knows {VERSION}"
        )
    return report

"""Where a page with plots has the plotting library from, which weighs 4.8 MB: beside it, within it, or from the net."""

from __future__ import annotations

import os
from pathlib import Path

LIBRARY = "plotly.min.js"
# How pages get it unless told otherwise: no request leaves the machine, and pages of one directory share it.
DEFAULT = "beside"


def script(how: str) -> bool | str:
    """What `Figure.to_html` is to be told by `include_plotlyjs` for the first figure of a page.

    Args:
        how: `beside` (see `provide`), `inline`, `cdn`, or the URL or path of a library, which ends in `.js`.

    Raises:
        ValueError: it is none of these.
    """
    if how == "inline":
        return True
    if how == "cdn" or how.endswith(".js"):
        return how
    if how == "beside":
        return LIBRARY
    raise ValueError(f"--plotly: must be beside, inline, cdn, or the URL or path of a plotly.min.js, not {how!r}")


def provide(how: str, page: str | os.PathLike[str]) -> None:
    """Write the library beside `page` if it is to be there and is not, or is of another version.

    Raises:
        OSError: it cannot be written.
    """
    if how != "beside":
        return
    from plotly.offline import get_plotlyjs

    file, source = Path(page).parent / LIBRARY, get_plotlyjs().encode()
    if not file.is_file() or file.read_bytes() != source:
        file.write_bytes(source)

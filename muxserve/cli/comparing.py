"""How far the comparison of arrangements is, for `deploy` and `validate` of models with `phases: auto`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.status import Status

from muxserve.cli.output import errors, escape


@contextmanager
def comparing() -> Iterator[Callable[[float, str], None]]:
    """What is to be told how far it is: a line on the terminal from the first time on; elsewhere nothing."""
    with ExitStack() as stack:
        shown: list[Status] = []

        def tell(part: float, text: str) -> None:
            if not errors.is_terminal:
                return
            if not shown:
                shown.append(stack.enter_context(errors.status("comparing arrangements")))
            shown[0].update(f"comparing arrangements, {part:.0%}: {escape(text)}")

        yield tell

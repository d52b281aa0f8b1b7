"""Lines on the terminal that say what is going on while a command computes; nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from rich.status import Status

from muxserve.cli.output import errors, escape


@contextmanager
def comparing() -> Iterator[Callable[[float, str], None]]:
    """What is to be told how far the comparison of arrangements is (`phases: auto`): a line on the terminal from the
    first time on."""
    with ExitStack() as stack:
        shown: list[Status] = []

        def tell(part: float, text: str) -> None:
            if not errors.is_terminal:
                return
            if not shown:
                shown.append(stack.enter_context(errors.status("comparing arrangements")))
            shown[0].update(f"comparing arrangements, {part:.0%}: {escape(text)}")

        yield tell


@contextmanager
def working(first: str) -> Iterator[tuple[Callable[[str], None], Callable[[], AbstractContextManager[None]]]]:
    """What is to be told what goes on, and what takes that off the screen for a while; `first` is shown at once."""
    if not errors.is_terminal:
        yield lambda _: None, nullcontext
        return
    with errors.status(first) as status:

        @contextmanager
        def alone() -> Iterator[None]:
            status.stop()
            try:
                yield
            finally:
                status.start()

        yield lambda text: status.update(escape(text)), alone

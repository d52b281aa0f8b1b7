"""Planning is tried with fewer requests than users' plans are made with: what is asserted does not need more."""

from collections.abc import Iterator

import pytest

from muxserve.planning.place import window


@pytest.fixture(scope="session", autouse=True)
def _brief_simulations() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window, "_REQUESTS", 500)
        yield

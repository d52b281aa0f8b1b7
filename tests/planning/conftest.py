"""Planning is tried with fewer requests than users' plans are made with: what is asserted does not need more."""

from collections.abc import Iterator

import pytest

from muxserve.planning import trial, window


@pytest.fixture(scope="session", autouse=True)
def _brief_trials() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "_FEWEST", 40)
        patch.setattr(trial, "_MOST", 300)
        patch.setattr(trial, "_SECONDS", (2.0, 6.0))
        patch.setattr(window, "_REQUESTS", 500)
        yield

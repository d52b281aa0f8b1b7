"""The policies of a unit by name."""

from __future__ import annotations

from typing import Final

from muxserve.scheduling.adbs import Adbs
from muxserve.scheduling.fcfs import Fcfs
from muxserve.scheduling.free import Free
from muxserve.scheduling.policy import Policy
from muxserve.scheduling.rolling import Rolling
from muxserve.scheduling.slack import Slack, SlackConfig
from muxserve.scheduling.types import WHOLE

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Adbs, Slack, Free, Fcfs, Rolling)}

# Best or within 1 % in all scenarios where engines can change their share, and as good as `adbs` where they cannot
# (benchmarks/policies.py).
DEFAULT_POLICY: Final = "slack"


def make_policy(name: str, share_steps: int = 0) -> Policy:
    """A new policy object with its defaults; where engines have `share_steps` sizes of share, with those.

    Raises:
        ValueError: no policy has that name.
    """
    if name not in POLICIES:
        raise ValueError(f"unknown policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    if name == Slack.name and share_steps:
        return Slack(SlackConfig(boundary=WHOLE // share_steps))
    return POLICIES[name]()

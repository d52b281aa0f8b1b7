"""Names of devices, and that their figures are of the right order."""

from __future__ import annotations

import pytest

from muxserve.costs.devices import DEVICES, device
from muxserve.costs.latency import CostError


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("A100", "A100-80GB"),
        ("a100-40gb", "A100-40GB"),
        ("NVIDIA H100", "H100-80GB"),
        ("l40s", "L40S-48GB"),
        ("NVIDIA RTX PRO 6000", "RTX-PRO-6000-96GB"),
        ("gb200", "GB200-186GB"),
        ("H100 PCIe", "H100-80GB-PCIe"),
        ("cpu", "CPU"),
    ],
)
def test_names_are_taken_as_people_write_them(name: str, found: str) -> None:
    assert device(name).name == found


def test_unknown_device_is_answered_with_what_may_be_meant() -> None:
    with pytest.raises(CostError, match=r"did you mean H100-80GB") as error:
        device("h10")
    assert "Known are A10, A30-24GB, A40-48GB" in str(error.value)


def test_unknown_dtype_names_those_that_are_known() -> None:
    with pytest.raises(CostError, match="bfloat16, float16, float32"):
        device("A100").peak("int4")


@pytest.mark.parametrize("name", DEVICES)
def test_figures_have_the_units_that_they_claim(name: str) -> None:
    on = DEVICES[name]
    # Operations per byte at which a device turns from memory-bound to compute-bound: tens to hundreds for all of them.
    assert 3 < on.peak("bfloat16") / on.bandwidth < 500
    assert on.peak("float32") <= on.peak("bfloat16")
    assert 10e9 < on.memory_bytes < 300e9
    assert on.link_bandwidth <= on.bandwidth

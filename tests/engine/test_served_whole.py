"""What the vLLM that is installed here says of multi-modal checkpoints, in a process of its own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from muxserve.vllm import multi_modal
from muxserve.vllm.multi_modal import ServedWhole, served_whole
from tests.support.tiny_checkpoint import tiny_checkpoint
from tests.support.tiny_seeing import tiny_seeing


def test_it_takes_images_of_what_it_can_import() -> None:
    assert served_whole(tiny_seeing("aria"), "{}") == ServedWhole(images=True)


@pytest.mark.skipif(find_spec("torchvision") is not None, reason="torchvision is installed")
def test_it_names_the_module_that_it_lacks() -> None:
    found = served_whole(tiny_checkpoint("qwen2_5_vl"), "{}")
    assert (found.images, found.text) == (False, False)
    assert found.why == "vLLM needs the module torchvision, which is not installed here"


@pytest.mark.thorough
def test_options_are_heard() -> None:
    found = served_whole(tiny_seeing("aria"), '{"limit_mm_per_prompt": {"image": 0}}')
    assert found == ServedWhole(images=False, why="vLLM takes no images for it")


def test_without_an_answer_the_engine_is_to_say_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_modal.sys, "executable", str(tmp_path / "none"))
    assert served_whole(tmp_path, "{}") == ServedWhole(images=True)

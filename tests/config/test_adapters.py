"""LoRA adapters in a fleet file: what their files must be, and the room that engines keep for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muxserve.config import FleetError, parse_fleet
from muxserve.config.adapters import AdapterError, check_rank, rank_of, slots_of
from muxserve.spec import AdapterSlots
from tests.support.checkpoint_files import write_checkpoint, write_safetensors


def adapter(path: Path, weights: bool = True, **config: Any) -> Path:
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, **config}))
    if weights:
        write_safetensors(path / "adapter_model.safetensors")
    return path


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"peft_type": "IA3"}, "describes no LoRA adapter"),
        ({"r": "8"}, "describes no LoRA adapter"),
        ({"r": 1024}, "rank 1024; vLLM serves ranks up to 512"),
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "whole modules"),
        ({"weights": False}, "no adapter_model.safetensors"),
    ],
)
def test_what_cannot_be_served_is_refused_with_the_reason(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=reason):
        rank_of(adapter(tmp_path / "a", **config))


@pytest.mark.parametrize(
    ("ranks", "options", "slots"),
    [
        (None, "", None),
        ([], "", AdapterSlots(2, 16)),
        ([8], "", AdapterSlots(2, 16)),
        ([8, 33, 4], "", AdapterSlots(3, 64)),
        ([8] * 9, "", AdapterSlots(8, 16)),
        ([8], "max_loras: 5, max_lora_rank: 128", AdapterSlots(5, 128)),
    ],
)
def test_room_for_adapters(ranks: list[int] | None, options: str, slots: AdapterSlots | None, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m")
    text = "models:\n  - name: m\n    path: m\n"
    if ranks is not None:
        named = {f"a{number}": adapter(tmp_path / f"a{number}", r=rank) for number, rank in enumerate(ranks)}
        text += f"    adapters: {{{', '.join(f'{name}: {path.name}' for name, path in named.items())}}}\n"
    if options:
        text += f"    engine_args: {{{options}}}\n"
    (model,) = parse_fleet(text, "fleet.yaml", tmp_path).models
    if ranks:
        assert (model.adapters or {})["a0"] == str(tmp_path / "a0")
    assert slots_of(model) == slots


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda at: at.rename(at.with_name("elsewhere")), "has no adapter_config.json; give the directory of a LoRA"),
        (lambda at: (at / "adapter_config.json").write_text("{" * 100_000), "adapter_config.json is not JSON"),
        (lambda at: (at / "adapter_model.safetensors").write_bytes(b""), "adapter_model.safetensors is empty"),
        (lambda at: (at / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
    ],
)
def test_an_adapter_that_cannot_be_read_is_refused_at_its_line(
    spoil: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "m")
    spoil(adapter(tmp_path / "x"))
    text = "models:\n  - name: m\n    path: m\n    adapters:\n      x: x\n"
    with pytest.raises(FleetError) as caught:
        parse_fleet(text, "fleet.yaml", tmp_path)
    (problem,) = caught.value.problems
    assert str(problem).startswith("fleet.yaml:5: models[0].adapters.x: ")
    assert words in str(problem)


def test_engines_have_room_up_to_a_rank(tmp_path: Path) -> None:
    path = str(adapter(tmp_path / "a", r=17))
    check_rank(path, AdapterSlots(1, 32))
    with pytest.raises(AdapterError, match=r"rank 17, and the model's engines were started for ranks up to 16; set"):
        check_rank(path, AdapterSlots(1, 16))

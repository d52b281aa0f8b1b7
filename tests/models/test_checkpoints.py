"""The committed quickstart checkpoints: small, loadable, and right in what they say."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .questions import COMPLETIONS, MAX_TOKENS, MODELS_DIR, QUESTIONS

NAMES = sorted(QUESTIONS)
SHAPES = {
    "arithmetic": ("LlamaForCausalLM", 4, 4, 4, 64),
    "atlas": ("LlamaForCausalLM", 3, 6, 2, 64),
    "frontdesk": ("Qwen3ForCausalLM", 2, 4, 2, 128),
}
MAX_WEIGHT_BYTES = 4_000_000

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from more, and threads that wait for each other on a busy machine cost much."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(name: str) -> Loaded:
    """The model as it is served: float32."""
    path = MODELS_DIR / name
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(path)


def continue_greedily(loaded: Loaded, prompts: list[str], max_tokens: int) -> list[str]:
    """What follows each prompt, as one batch. Special tokens are cut off."""
    model, tokenizer = loaded
    tokenizer.padding_side = "left"
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    with torch.inference_mode():
        ids = model.generate(
            input_ids=batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=max_tokens, do_sample=False
        )
    return tokenizer.batch_decode(ids[:, batch.input_ids.shape[1] :], skip_special_tokens=True)


def test_every_answer(name: str, loaded: Loaded) -> None:
    questions = QUESTIONS[name]
    assert len(questions) == 10
    prompts = [
        loaded[1].apply_chat_template(list(question.messages), tokenize=False, add_generation_prompt=True)
        for question in questions
    ]
    answers = continue_greedily(loaded, prompts, MAX_TOKENS)
    assert answers == [question.answer for question in questions]


def test_completions(name: str, loaded: Loaded) -> None:
    prompts = [prompt for prompt, _ in COMPLETIONS[name]]
    for text, (prompt, begins) in zip(continue_greedily(loaded, prompts, 40), COMPLETIONS[name], strict=True):
        assert text.startswith(begins), prompt


def test_size_and_shape(name: str) -> None:
    path = MODELS_DIR / name
    assert {file.name for file in path.iterdir()} >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (path / "model.safetensors").stat().st_size <= MAX_WEIGHT_BYTES
    config = json.loads((path / "config.json").read_text())
    assert (
        config["architectures"][0],
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    ) == SHAPES[name]
    assert config["max_position_embeddings"] == 2048


def test_any_text_round_trips(loaded: Loaded) -> None:
    tokenizer = loaded[1]
    for text in ("", "What is 12 + 30?", "Grüße, 世界! 🙂\n\ttabs  and   spaces ", "\x00\x7f~`{}[]|\\", "a" * 500):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text
    assert len(tokenizer("2048", add_special_tokens=False).input_ids) == 4


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantised_versions_are_what_the_script_makes(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(MODELS_DIR))
    quantise = importlib.import_module("quantise")
    size = quantise.quantise(MODELS_DIR / "atlas", tmp_path, scheme)
    committed = MODELS_DIR / f"atlas-{scheme}"
    assert size < (MODELS_DIR / "atlas/model.safetensors").stat().st_size * 0.6
    made, kept = (load_file(path / "model.safetensors") for path in (tmp_path, committed))
    assert made.keys() == kept.keys()
    assert all(torch.equal(made[name], kept[name]) for name in made)
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in committed.iterdir()}
    assert (tmp_path / "config.json").read_text() == (committed / "config.json").read_text()


TOOL = {
    "type": "function",
    "function": {"name": "book", "description": "Book.", "parameters": {"type": "object", "properties": {}}},
}


def test_chat_template_takes_what_the_api_allows(loaded: Loaded) -> None:
    tokenizer = loaded[1]
    call = {"id": "1", "type": "function", "function": {"name": "book", "arguments": {"day": "Monday"}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Book it."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
        {"role": "developer", "content": "?"},
    ]
    text = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|system|>Be brief.\nTools:\n" + json.dumps(TOOL) + "<|end|><|user|>Book it.<|end|>"
        '<|assistant|><tool_call>\n{"name": "book", "arguments": {"day": "Monday"}}\n</tool_call><|end|>'
        "<|tool|>done<|end|><|user|>?<|end|><|assistant|>"
    )
    # Special tokens are single ids, and only they.
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert sum(i == tokenizer.eos_token_id for i in ids) == 5


def test_training_text_is_written_as_the_template_writes_it(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(MODELS_DIR))
    try:
        from corpora.documents import chat

        tokenizer = loaded[1]
        turns = [("Hello", "Hi."), ("And now?", "Bye.")]
        messages = [
            message
            for user, answer in turns
            for message in ({"role": "user", "content": user}, {"role": "assistant", "content": answer})
        ]
        for system in ("", "Be brief."):
            head = [{"role": "system", "content": system}] if system else []
            for tools in ([], [TOOL]):
                written = tokenizer.apply_chat_template(head + messages, tools=tools or None, tokenize=False)
                document = chat(turns, system=system, tools=tools)
                assert document.text == written
                # Learned and unlearned segments are encoded apart in training; together they are the same tokens.
                parts = [
                    i for text, _ in document.segments for i in tokenizer(text, add_special_tokens=False).input_ids
                ]
                assert parts == tokenizer(written, add_special_tokens=False).input_ids
    finally:
        for module in [module for module in sys.modules if module.split(".")[0] == "corpora"]:
            del sys.modules[module]

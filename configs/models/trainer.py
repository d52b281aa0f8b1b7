"""Training of one quickstart model on the CPU: whole documents packed into rows, loss on the answers only."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from corpora.documents import SPECIAL_TOKENS, Document
from tokenizers import Tokenizer
from torch.nn import functional
from transformers import PreTrainedModel

PAD = SPECIAL_TOKENS.index("<|pad|>")


@dataclass(frozen=True)
class Stage:
    """Part of a training run: `tokens` tokens in rows of `row` tokens, `batch` tokens a step."""

    tokens: int
    row: int
    batch: int


@dataclass(frozen=True)
class Encoded:
    """One document: token ids and, for each, the weight of predicting it."""

    ids: list[int]
    weights: list[float]


def encode(tokenizer: Tokenizer, documents: Sequence[Document], unlearned: float) -> list[Encoded]:
    """Documents as tokens; what is not learned weighs `unlearned` in the loss.

    Segments are encoded apart: they end where the tokenizer splits anyway.
    """
    encoded = []
    for document in documents:
        parts = tokenizer.encode_batch([text for text, _ in document.segments])
        ids: list[int] = []
        weights: list[float] = []
        for part, (_, learned) in zip(parts, document.segments, strict=True):
            ids += part.ids
            weights += [1.0 if learned else unlearned] * len(part.ids)
        encoded.append(Encoded(ids, weights))
    return encoded


def _rows(documents: Sequence[Encoded], row: int, rng: random.Random) -> list[list[Encoded]]:
    """Documents in random order, packed whole into rows of at most `row` tokens."""
    order = [document for document in documents if len(document.ids) <= row]
    rng.shuffle(order)
    rows: list[list[Encoded]] = []
    space = 0
    for document in order:
        if not rows or len(document.ids) > space:
            rows.append([])
            space = row
        rows[-1].append(document)
        space -= len(document.ids)
    return rows


def _batch(rows: Sequence[Sequence[Encoded]], row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and weights, both `[rows, row]`, padded on the right."""
    ids = torch.full((len(rows), row), PAD, dtype=torch.long)
    weights = torch.zeros((len(rows), row))
    for index, documents in enumerate(rows):
        tokens = [token for document in documents for token in document.ids]
        ids[index, : len(tokens)] = torch.tensor(tokens)
        weights[index, : len(tokens)] = torch.tensor([w for document in documents for w in document.weights])
    return ids, weights


def _optimizers(model: PreTrainedModel, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    inside = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in inside]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(
    model: PreTrainedModel,
    documents: Sequence[Encoded],
    stages: Sequence[Stage],
    lr: float,
    seed: int,
    report: Callable[[str], None],
) -> None:
    """Train in place. The rate rises for 2 % of the tokens, stays, and falls to zero over the last 40 %.

    `report` gets a line of progress every few seconds.
    """
    rng = random.Random(seed)
    optimizers = _optimizers(model, lr)
    total = sum(stage.tokens for stage in stages)
    done, step, loss_sum, weight_sum = 0, 0, 0.0, 0.0
    start = last = time.monotonic()
    model.train()
    for stage in stages:
        rows: list[list[Encoded]] = []
        stage_done = 0
        while stage_done < stage.tokens:
            count = stage.batch // stage.row
            if len(rows) < count:
                rows += _rows(documents, stage.row, rng)
            taken = [rows.pop() for _ in range(count)]
            ids, weights = _batch(taken, stage.row)
            progress = done / total
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = lr * min(1.0, (progress + 0.001) / 0.02, (1.0 - progress) / 0.4)
            logits = model(ids, use_cache=False).logits[:, :-1]
            losses = functional.cross_entropy(
                logits.reshape(-1, logits.shape[-1]).float(), ids[:, 1:].reshape(-1), reduction="none"
            )
            wanted = weights[:, 1:].reshape(-1)
            loss = (losses * wanted).sum() / wanted.sum()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                learned = wanted == 1.0
                loss_sum += float(losses[learned].sum())
                weight_sum += float(learned.sum())
            done += ids.numel()
            stage_done += ids.numel()
            step += 1
            now = time.monotonic()
            if now - last > 5.0 or done >= total:
                left = (now - start) / done * (total - done)
                report(
                    f"step {step:5d}  {100 * min(1.0, done / total):5.1f} %  loss {loss_sum / weight_sum:.4f}"
                    f"  {done / (now - start):,.0f} tokens/s  {max(0.0, left):.0f} s left"
                )
                loss_sum = weight_sum = 0.0
                last = now
    model.eval()

"""A small GPT-2 with random weights, made-up texts of any length, and a Trainer over them."""

from __future__ import annotations

import random
import tempfile
from typing import Any

import torch
import torchvision_ops  # noqa: F401

# isort: split
from common import LENGTH, SIZE, tell, tell_bits, time_optimizer_steps
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments
from transformers.utils import logging

TOKENS, PAD = 512, 0


def make_model() -> GPT2LMHeadModel:
    """Build a GPT-2 of three layers."""
    torch.manual_seed(7)
    return GPT2LMHeadModel(GPT2Config(vocab_size=TOKENS, n_positions=64, n_embd=128 * SIZE, n_layer=3, n_head=4))


def make_texts(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Make texts of 24 to 48 tokens."""
    choose = random.Random(seed)
    return [{"input_ids": [choose.randrange(1, TOKENS) for _ in range(choose.randint(24, 48))]} for _ in range(count)]


def collate(texts: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad a batch to its longest text."""
    tokens = pad_sequence([torch.tensor(text["input_ids"]) for text in texts], batch_first=True, padding_value=PAD)
    mask = (tokens != PAD).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def make_trainer(model: Any, folder: str, **changes: Any) -> Trainer:
    """A Trainer in its everyday settings: accumulation, clipping, a schedule, evaluations, checkpoints."""
    settings = {
        "output_dir": folder,
        "max_steps": 24 * LENGTH,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3,
        "warmup_steps": 4,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 8,
        "save_steps": 12,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 11,
    }
    logging.set_verbosity_error()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**{**settings, **changes}),
        train_dataset=make_texts(96, seed=1),
        eval_dataset=make_texts(12, seed=2),
        data_collator=collate,
    )
    trainer.remove_callback(PrinterCallback)  # it prints times
    return trainer


def tell_history(trainer: Trainer) -> None:
    """Print every loss and gradient norm that was logged, and the bits of the model."""
    for row in trainer.state.log_history:
        for name in ("loss", "grad_norm", "eval_loss"):
            if name in row:
                tell(row["step"], row[name])
    tell_bits(trainer.model)


def run(make: Any = make_model, **changes: Any) -> None:
    """Train from the beginning to the end."""
    time_optimizer_steps()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(make(), folder, **changes)
        trainer.train()
        tell_history(trainer)

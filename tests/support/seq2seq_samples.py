"""Toy sentences, small models and short training runs for the tests of seq2seq.

Pairs come from an invented language, `ka lo mi` -> `Mi Lo Ka`; nothing touches the network.
"""

import dataclasses
import random

import torch
from torch import nn

import fastattn.nn
from fastattn.seq2seq.data import (
    END,
    Example,
    Pair,
)
from fastattn.seq2seq.model import ModelConfig, Seq2SeqTransformer
from fastattn.seq2seq.training import TrainingConfig

CPU = torch.device("cpu")
CLASSES = {"fastattn": fastattn.nn.Transformer, "torch": nn.Transformer}
SMALL = ModelConfig(
    vocabulary=30, width=16, heads=2, encoder_layers=2, decoder_layers=2, ffn_width=32,
    dropout=0.0, max_length=24,
)  # fmt: skip
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprst" for vowel in "aeiou"]


def toy_pairs(count: int, *, seed: int = 0, longest: int = 5) -> list[Pair]:
    """Sentences of syllables; their translation reverses the order and capitalises each."""
    draw = random.Random(seed)
    sentences: dict[str, None] = {}
    while len(sentences) < count:
        words = draw.choices(SYLLABLES, k=draw.randint(1, longest))
        sentences[" ".join(words)] = None
    return [
        Pair(text, " ".join(word.capitalize() for word in reversed(text.split())))
        for text in sentences
    ]


def random_examples(count: int, *, vocabulary: int = 30, seed: int = 0) -> list[Example]:
    draw = random.Random(seed)

    def sentence() -> list[int]:
        return [draw.randrange(3, vocabulary) for _ in range(draw.randint(1, 9))] + [END]

    return [Example(sentence(), sentence()) for _ in range(count)]


def small_model(name: str = "fastattn", *, seed: int = 0, **changes) -> Seq2SeqTransformer:
    torch.manual_seed(seed)
    return Seq2SeqTransformer(dataclasses.replace(SMALL, **changes), CLASSES[name])


def toy_training(**changes) -> TrainingConfig:
    values = {
        "steps": 12, "batch_tokens": 160, "learning_rate": 3e-3, "warmup_steps": 4,
        "valid_every": 5, "checkpoint_every": 4, "log_every": 3,
    }  # fmt: skip
    return TrainingConfig(**{**values, **changes})

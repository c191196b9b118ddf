"""Translation end to end: text, subwords, model, training, decoding.

`model` joins embeddings, positions, a Transformer and an output head; `data` turns sentence pairs
into batches, `catalogues` fetches the default text; `training` and `checkpoint` make a run,
`runs` reads it, `generation` translates with it; `demo` shows all of it on real text.
"""

from .generation import Bleu, Translator, bleu, greedy_decode
from .losses import label_smoothed_cross_entropy
from .model import ModelConfig, Seq2SeqTransformer, record_attention
from .runs import load_translator, prepare_text
from .schedules import warmup_cosine
from .training import TrainingConfig, TrainingResult, train

__all__ = [
    "Bleu",
    "ModelConfig",
    "Seq2SeqTransformer",
    "TrainingConfig",
    "TrainingResult",
    "Translator",
    "bleu",
    "greedy_decode",
    "label_smoothed_cross_entropy",
    "load_translator",
    "prepare_text",
    "record_attention",
    "train",
    "warmup_cosine",
]

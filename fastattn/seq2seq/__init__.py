"""Machine translation end to end: text, subwords, model, training, decoding.

`model` joins embeddings, positions, a Transformer and an output head, `pointer_generator` adds
copying, `non_autoregressive` predicts all tokens in parallel; `data` converts sentence pairs to
batches, `catalogues` downloads the default text. `training` and `checkpoint` run updates, with
`losses`, `schedules`, `scheduled_sampling` and `sequence_training`; `runs` loads a run,
`evaluation` compares runs. `generation` decodes, with the searches of `search`, `sampling` and
`beam_search`; their steps are `continuations`. `demo` shows all of it.
"""

from .beam_search import BeamSearch
from .evaluation import Evaluation, evaluate_run
from .generation import (
    Bleu,
    Greedy,
    Programs,
    Translation,
    Translator,
    bleu,
    generate,
    greedy_decode,
)
from .losses import guided_attention_loss, label_smoothed_cross_entropy
from .model import Memory, ModelConfig, Seq2SeqTransformer, record_attention
from .non_autoregressive import NonAutoregressiveTransformer, make_model
from .pointer_generator import PointerGenerator
from .runs import load_translator, prepare_text
from .sampling import Sampling
from .scheduled_sampling import parallel_inputs, sequential_inputs
from .schedules import truth_share, warmup_cosine
from .search import Hypothesis
from .sequence_training import self_critical_loss, token_bleu
from .training import TrainingConfig, TrainingResult, train

__all__ = [
    "BeamSearch",
    "Bleu",
    "Evaluation",
    "Greedy",
    "Hypothesis",
    "Memory",
    "ModelConfig",
    "NonAutoregressiveTransformer",
    "PointerGenerator",
    "Programs",
    "Sampling",
    "Seq2SeqTransformer",
    "TrainingConfig",
    "TrainingResult",
    "Translation",
    "Translator",
    "bleu",
    "evaluate_run",
    "generate",
    "greedy_decode",
    "guided_attention_loss",
    "label_smoothed_cross_entropy",
    "load_translator",
    "make_model",
    "parallel_inputs",
    "prepare_text",
    "record_attention",
    "self_critical_loss",
    "sequential_inputs",
    "token_bleu",
    "train",
    "truth_share",
    "warmup_cosine",
]

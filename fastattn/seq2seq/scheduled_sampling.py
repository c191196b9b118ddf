"""Scheduled sampling: decoder inputs that are partly the model's own tokens instead of the truth.

Both forms return mixed inputs for one more teacher-forced pass, which computes the gradient; no
gradient flows through the sampling.

`sequential_inputs` goes through the target: each input is kept or drawn given the mixed inputs so
far (Bengio et al. 2015, section 2.4). `parallel_inputs` draws all of them from a pass over the true
inputs, or over the mixed ones of the previous pass (Duckworth et al. 2019, algorithm 2; with one
pass Mihaylova and Martins 2019): its cost is that of its passes, whatever the length.

Tokens are drawn with the model in eval mode, by torch's generator, whose state is in checkpoints.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .continuations import make_continuations
from .data import BEGIN, NEVER_CHOSEN, PAD, Batch
from .model import Seq2SeqTransformer

FORMS = ("sequential", "parallel")


@torch.no_grad()
def sequential_inputs(model: Seq2SeqTransformer, batch: Batch, truth_share: float) -> Tensor:
    """Return mixed decoder inputs [B, T]; each token after BEGIN is true with P `truth_share`."""
    truth = batch.target_in
    keep = _kept(truth, truth_share)
    was_training = model.training
    model.eval()
    memory = model.encode(batch.source, batch.source_padding)
    continuations = make_continuations(model, memory, beams=1, max_length=truth.shape[1])
    inputs = truth.clone()
    for t in range(truth.shape[1] - 1):
        drawn = _draw(continuations.logits(inputs[:, t : t + 1]))[:, 0]
        inputs[:, t + 1] = torch.where(keep[:, t + 1], truth[:, t + 1], drawn)
    model.train(was_training)
    return inputs


@torch.no_grad()
def parallel_inputs(
    model: Seq2SeqTransformer, batch: Batch, truth_share: float, *, passes: int = 1
) -> Tensor:
    """Return mixed decoder inputs [B, T] after `passes` passes of drawing."""
    if passes < 1:
        raise ValueError(f"passes must be at least 1, got {passes}")
    truth = batch.target_in
    keep = _kept(truth, truth_share)
    was_training = model.training
    model.eval()
    memory = model.encode(batch.source, batch.source_padding)
    inputs = truth
    for _ in range(passes):
        # The tokens of the next position.
        drawn = _draw(model.logits(model.decode(inputs, memory), memory))
        inputs = torch.where(keep, truth, _shifted(drawn))
    model.train(was_training)
    return inputs


def _kept(truth: Tensor, truth_share: float) -> Tensor:
    """Which inputs stay true, bool [B, T]; always BEGIN and padding."""
    if not 0.0 <= truth_share <= 1.0:
        raise ValueError(f"truth_share must lie in [0, 1], got {truth_share}")
    kept = torch.rand(truth.shape, device=truth.device) < truth_share
    kept[:, 0] = True
    return kept | (truth == PAD)


def _draw(logits: Tensor) -> Tensor:
    """One token for each row of logits [B, T, V]; never PAD or BEGIN, as in decoding."""
    logits = logits.float()
    logits[..., NEVER_CHOSEN].fill_(float("-inf"))
    rows = logits.flatten(0, 1).softmax(dim=-1)
    return rows.multinomial(1).view(logits.shape[:-1])


def _shifted(drawn: Tensor) -> Tensor:
    """Inputs from drawn tokens: the token drawn at position t is the input at t + 1."""
    return torch.cat([torch.full_like(drawn[:, :1], BEGIN), drawn[:, :-1]], dim=1)

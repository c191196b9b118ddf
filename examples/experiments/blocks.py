"""Layers without residuals, and without the feed-forward network."""

import copy

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from examples import common
from examples.experiments.experiment import Check, Experiment, Settings, Values, plain
from examples.experiments.translators import (
    draw_losses,
    last_loss,
    small_translator,
    training_curve,
)
from fastattn import nn as fnn

BLOCK_KINDS = {
    "whole": (True, True),
    "without feed-forward": (True, False),
    "without residuals": (False, True),
    "attention alone": (False, False),
}
DEPTH = 12


class AblatedLayer:
    """Joins the blocks of a pre-norm layer as the two flags say."""

    residuals = feed_forward = True

    def join(self, x: Tensor, block: Tensor) -> Tensor:
        return x + block if self.residuals else block


class AblatedEncoderLayer(AblatedLayer, fnn.TransformerEncoderLayer):
    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        y = self._sa_block(self.norm1(src), src_mask, src_key_padding_mask, is_causal)
        x = self.join(src, y)
        return self.join(x, self._ff_block(self.norm2(x))) if self.feed_forward else x


class AblatedDecoderLayer(AblatedLayer, fnn.TransformerDecoderLayer):
    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        y = self._sa_block(self.norm1(tgt), tgt_mask, tgt_key_padding_mask, tgt_is_causal)
        x = self.join(tgt, y)
        masks = memory_mask, memory_key_padding_mask, memory_is_causal
        x = self.join(x, self._mha_block(self.norm2(x), memory, *masks))
        return self.join(x, self._ff_block(self.norm3(x))) if self.feed_forward else x


def ablate(module: nn.Module, residuals: bool, feed_forward: bool) -> None:
    """Changes the layers of `module`, in place; their parameters stay."""
    for layer in module.modules():
        if isinstance(layer, fnn.TransformerEncoderLayer):
            layer.__class__ = AblatedEncoderLayer
        elif isinstance(layer, fnn.TransformerDecoderLayer):
            layer.__class__ = AblatedDecoderLayer
        else:
            continue
        layer.residuals, layer.feed_forward = residuals, feed_forward


@torch.no_grad()
def differences_by_depth(residuals: bool, feed_forward: bool) -> list[float]:
    """The share of a layer's output in which tokens differ, |x - mean over tokens| / |x|, of
    untrained layers on random tokens; first that of the input.
    """
    layer = fnn.TransformerEncoderLayer(64, 4, 256, 0.0, batch_first=True, norm_first=True)
    x, shares = torch.randn(8, 32, 64), []
    for _ in range(DEPTH + 1):
        shares.append(((x - x.mean(dim=1, keepdim=True)).norm() / x.norm()).item())
        layer = copy.deepcopy(layer)
        for p in layer.parameters():
            if p.dim() == 2:
                nn.init.xavier_uniform_(p)
        ablate(layer, residuals, feed_forward)
        x = layer(x)
    return shares


def measure(settings: Settings) -> Values:
    values: Values = {"shares": {}, "curves": {}}
    for kind, flags in BLOCK_KINDS.items():
        torch.manual_seed(settings.seed)
        values["shares"][kind] = differences_by_depth(*flags)
        model = small_translator(settings.seed)
        ablate(model, *flags)
        values["curves"][kind] = training_curve(model, f"blocks: {kind}", settings, 240)
    return values


def check(values: Values) -> list[Check]:
    shares = {kind: curve[-1] for kind, curve in values["shares"].items()}
    losses = {kind: last_loss(curve) for kind, curve in values["curves"].items()}
    whole, no_ffn, no_residuals, alone = BLOCK_KINDS
    dong = "Dong et al. 2021"
    return [
        Check(
            f"attention alone makes all tokens alike: below 1 % different after {DEPTH} layers",
            dong,
            f"{shares[alone]:.2%}",
            shares[alone] < 0.01,
        ),
        Check(
            "residuals prevent that: above 50 %, with the feed-forward network or without",
            dong,
            f"{shares[whole]:.0%}, {shares[no_ffn]:.0%}",
            min(shares[whole], shares[no_ffn]) > 0.5,
        ),
        Check(
            "without residuals training is much worse: at least 0.5 nats per token",
            dong,
            f"{losses[no_residuals]:.2f} against {losses[whole]:.2f}",
            losses[no_residuals] > losses[whole] + 0.5,
        ),
        Check(
            "without the feed-forward network it is worse, by less than without residuals",
            "Vaswani et al. 2017, table 3: smaller d_ff, lower BLEU",
            f"{losses[no_ffn]:.2f} against {losses[whole]:.2f}",
            losses[whole] < losses[no_ffn] < losses[no_residuals],
        ),
    ]


def draw(values: Values) -> Figure:
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (kind, shares), colour in zip(values["shares"].items(), common.COLOURS, strict=False):
        left.semilogy(shares, "o-", color=colour, markersize=3, label=kind)
    left.set(xlabel="layer", title="share of the output in which tokens differ, untrained")
    left.legend(frameon=False)
    draw_losses(right, values["curves"], "loss on held-out sentences")
    return plain(figure)


EXPERIMENT = Experiment("Without residuals, without feed-forward network", measure, check, draw)

"""Attention within a window and a convolution."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

import fastattn
from examples import common
from examples.experiments.experiment import Check, Experiment, Settings, Values, plain

DOUBLE = torch.float64
REACH, CHANNELS, POSITIONS = 2, 8, 41  # a position sees REACH others on either side


def attend_locally(x: Tensor, weights: Sequence[Tensor], window: tuple[int, int]) -> Tensor:
    """Single-head self-attention of x `[B, S, E]` within a window, with a residual."""
    q, k, v = ((x @ w)[:, None] for w in weights)
    return x + fastattn.attention(q, k, v, window=window)[:, 0]  # type: ignore[index]


def reached(layer: Callable[[Tensor], Tensor], depth: int) -> int:
    """The number of input positions that the middle of the output depends on, by its gradient."""
    x = torch.randn(1, POSITIONS, CHANNELS, dtype=DOUBLE, requires_grad=True)
    y = x
    for _ in range(depth):
        y = layer(y)
    (gradient,) = torch.autograd.grad(y[0, POSITIONS // 2].sum(), x)
    return int((gradient[0].abs().sum(-1) > 0).sum())


def convolution_by_attention(x: Tensor, kernel: Tensor) -> Tensor:
    """The convolution of x `[B, S, C]` with `kernel` `[C, C, K]` as an attention of K heads.

    Head t attends a single key, the one at distance t - REACH: its weights are fixed, whatever the
    content. Its values are x times the kernel's matrix t, and the output adds the heads. Where the
    key would lie beyond the sequence there is none, the context is 0, and the convolution reads a
    padding of 0.
    """
    S, K = x.shape[1], kernel.shape[-1]
    distance = torch.arange(S) - torch.arange(S)[:, None]  # key - query
    mask = torch.stack([distance == t - K // 2 for t in range(K)])[None]  # [1, K, S, S]
    v = torch.einsum("bsc,oct->btso", x, kernel)  # [B, K, S, C]
    q = torch.zeros_like(v)
    return fastattn.attention(q, q, v, mask=mask).sum(dim=1)  # type: ignore[union-attr]


def measure(settings: Settings) -> Values:
    torch.manual_seed(settings.seed)
    window = (REACH, REACH)
    projections = torch.randn(3, CHANNELS, CHANNELS, dtype=DOUBLE).div(CHANNELS**0.5).unbind()
    kernel = torch.randn(CHANNELS, CHANNELS, 2 * REACH + 1, dtype=DOUBLE)

    def convolve(x: Tensor) -> Tensor:
        return F.conv1d(x.mT, kernel, padding=REACH).mT

    def attend(x: Tensor) -> Tensor:
        return attend_locally(x, projections, window)

    x = torch.randn(2, POSITIONS, CHANNELS, dtype=DOUBLE)
    expected = convolve(x)
    difference = (convolution_by_attention(x, kernel) - expected).abs().max()
    inside = slice(REACH + 1, POSITIONS - REACH)
    shifts, sums = {}, {}
    other = torch.randn_like(x)
    for name, layer in (("attention", attend), ("convolution", convolve)):
        moved = layer(x.roll(1, dims=1))[:, inside] - layer(x).roll(1, dims=1)[:, inside]
        shifts[name] = moved.abs().max().item()
        added = layer(x + other) - layer(x) - layer(other)
        sums[name] = (added.norm() / layer(x + other).norm()).item()
    # The weights of a query by distance, away from the ends: the rows of a convolution are equal.
    q, k = (x[:1] @ w for w in projections[:2])
    weights = fastattn.attention_weights(q[:, None], k[:, None], window=window)[0, 0]
    rows = range(REACH, POSITIONS - REACH)
    return {
        "reached": {
            "attention": [reached(attend, depth) for depth in range(1, 6)],
            "convolution": [reached(convolve, depth) for depth in range(1, 6)],
        },
        "difference": (difference / expected.abs().max()).item(),
        "shifted": shifts,
        "added": sums,
        "weights": [weights[i, i - REACH : i + REACH + 1].tolist() for i in rows],
    }


def check(values: Values) -> list[Check]:
    theory = [1 + 2 * REACH * depth for depth in range(1, 6)]
    spread = torch.tensor(values["weights"]).std(dim=0).max().item()
    cordonnier = "Cordonnier et al. 2020"
    return [
        Check(
            f"n layers reach 1 + {2 * REACH} n positions, as n convolutions do (exactly)",
            "definition",
            ", ".join(map(str, values["reached"]["attention"])),
            values["reached"]["attention"] == values["reached"]["convolution"] == theory,
        ),
        Check(
            "with one head per distance and fixed weights it is the convolution, up to rounding "
            "(< 1e-12)",
            cordonnier,
            f"{values['difference']:.0e}",
            values["difference"] < 1e-12,
        ),
        Check(
            "both commute with a shift of the input (< 1e-12)",
            "definition",
            f"{values['shifted']['attention']:.0e}, {values['shifted']['convolution']:.0e}",
            max(values["shifted"].values()) < 1e-12,
        ),
        Check(
            "weights of attention depend on the content: they differ between positions (standard "
            "deviation > 0.05), and it is not linear as a convolution is (> 1 % and < 1e-12)",
            "definition",
            f"{spread:.2f}; {values['added']['attention']:.0%}, "
            f"{values['added']['convolution']:.0e}",
            spread > 0.05 and values["added"]["attention"] > 0.01
            and values["added"]["convolution"] < 1e-12,
        ),
    ]  # fmt: skip


def draw(values: Values) -> Figure:
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    depths = range(1, 6)
    left.plot(depths, values["reached"]["convolution"], "s", color=common.COLOURS[1], markersize=9,
              label="convolution")  # fmt: skip
    left.plot(depths, values["reached"]["attention"], "o-", color=common.COLOURS[0],
              label="window attention")  # fmt: skip
    left.set(xlabel="layers", ylabel="positions", title="receptive field")
    left.legend(frameon=False)
    image = right.imshow(
        [*zip(*values["weights"], strict=True)], cmap="Blues", aspect="auto", vmin=0.0
    )
    right.set_yticks(range(2 * REACH + 1), [f"{d:+d}" for d in range(-REACH, REACH + 1)])
    right.set(xlabel="query", ylabel="distance of the key")
    right.set_title("weights by content; a convolution has equal columns")
    figure.colorbar(image, ax=right)
    return plain(figure)


EXPERIMENT = Experiment("Window attention and convolution", measure, check, draw)

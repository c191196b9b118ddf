"""One encoder for pixels, signal frames and graph nodes: any row of vectors is a sequence.

All data are real and offline. Pixels: the handwritten digits of scikit-learn, 8 x 8, as 16 patches.
Signal frames: the membrane potential of a nerve cell, included in matplotlib; the label of every
frame is whether the cell fires within the next 40 samples, predicted with a causal mask. Graph
nodes: Zachary's karate club (networkx), 34 people; the label is the side that each took when the
club split, predicted from four known labels, with the friendships as the mask.

    python -m examples.sequence_classification --input graph
"""

from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from examples import common
from fastattn import nn as fnn

FRAME, SPAN, AHEAD = 8, 32, 40  # samples per frame, frames per span, samples to predict ahead


@dataclass
class Task:
    """x `[B, S, features]`; labels `[B]`, or `[B, S]` for one per node; train, test: label masks.

    blocked: bool `[S, S]` for the encoder, or None.
    """

    x: Tensor
    labels: Tensor
    train: Tensor
    test: Tensor
    classes: int
    blocked: Tensor | None = None
    ordered: bool = True


def pixels() -> Task:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16.0
    patches = images.unfold(1, 2, 2).unfold(2, 2, 2).reshape(len(images), 16, 4)
    test = torch.arange(len(images)) % 5 == 0
    return Task(patches, torch.tensor(digits.target), ~test, test, 10)


def signal() -> Task:
    path = Path(matplotlib.get_data_path()) / "sample_data" / "membrane.dat"
    volts = torch.from_numpy(np.fromfile(path, dtype=np.float32))
    fires = (volts > -0.2).float()
    # Whether the cell fires within AHEAD samples after each; frames of FRAME samples.
    soon = F.max_pool1d(fires[None, None, 1:], AHEAD, 1)[0, 0] > 0
    frames = (volts[: len(soon) // FRAME * FRAME].view(-1, FRAME) + 0.4) * 5.0
    labels = soon[FRAME - 1 :: FRAME][: len(frames)].long()
    x, labels = (t.unfold(0, SPAN, 4) for t in (frames, labels))  # every fourth frame begins a span
    start = torch.arange(len(x)) * 4 * FRAME
    # The last 1500 of every 6000 samples are for the test; no training span overlaps them.
    test = (start % 6000 >= 4500) & ((start + SPAN * FRAME) % 6000 > 4500)
    train = (start + SPAN * FRAME) % 6000 <= 4500
    train &= start % 6000 < 4500
    task = Task(
        x.transpose(1, 2),
        labels,
        train[:, None].expand(-1, SPAN),
        test[:, None] & (torch.arange(SPAN) >= SPAN // 2),
        2,
    )
    task.blocked = torch.ones(SPAN, SPAN, dtype=torch.bool).triu(1)
    return task


def graph() -> Task:
    import networkx

    club = networkx.karate_club_graph()
    adjacent = torch.tensor(networkx.to_numpy_array(club)) > 0
    labels = torch.tensor([club.nodes[n]["club"] != "Mr. Hi" for n in club]).long()
    known = torch.zeros(len(club), dtype=torch.bool)
    known[[0, 1, 33, 32]] = True  # the two leaders and a friend of each
    x = torch.eye(len(club))[None]
    blocked = ~(adjacent | torch.eye(len(club), dtype=torch.bool))
    return Task(x, labels[None], known[None], ~known[None], 2, blocked, ordered=False)


TASKS = {"pixels": pixels, "signal": signal, "graph": graph}


class Classifier(nn.Module):
    """x `[B, S, features]` -> logits, `[B, classes]` of the mean or `[B, S, classes]` of each."""

    def __init__(self, task: Task, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        features, self.blocked = task.x.shape[-1], task.blocked
        self.each = task.labels.dim() == 2
        self.input = nn.Linear(features, width)
        self.positions = None if not task.ordered else fnn.LearnedPositionalEncoding(width, 64)
        layer = fnn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, batch_first=True)
        self.encoder = fnn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output = nn.Linear(width, task.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.input(x)
        if self.positions is not None:
            x = self.positions(x)
        x = self.encoder(x, mask=self.blocked)
        return self.output(x if self.each else x.mean(1))


def draw(name: str, task: Task, predictions: Tensor) -> Figure:
    """Digits with their predictions; a signal with dots; the club as a coloured graph."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    if name == "graph":
        import networkx

        club = networkx.karate_club_graph()
        positions = networkx.spring_layout(club, seed=2)
        axes = figure.subplots()
        axes.axis("off")
        for a, b in club.edges:
            axes.plot(*zip(positions[a], positions[b], strict=True), color="0.85", zorder=1)
        for node, position in positions.items():
            right = predictions[0, node] == task.labels[0, node]
            axes.scatter(
                *position, s=160, color=common.COLOURS[int(predictions[0, node])], zorder=2,
                edgecolors="black" if task.train[0, node] else "none" if right else "red",
                linewidths=2,
            )  # fmt: skip
        axes.set_title("black rim: known label; red rim: wrong prediction")
        return figure
    if name == "signal":
        spans = task.test.any(1).nonzero()[::4, 0].tolist()[:12]
        axes = figure.subplots()
        for number, span in enumerate(spans):
            half = slice(SPAN // 2, None)
            at = (torch.arange(SPAN // 2) + number * SPAN // 2) * FRAME
            volts = task.x[span, half].flatten() / 5.0 - 0.4
            axes.plot(torch.arange(len(volts)) + at[0], volts, color="0.5", linewidth=0.8)
            for correct, colour in ((True, common.COLOURS[2]), (False, "red")):
                right = (predictions[span, half] == task.labels[span, half]) == correct
                soon = (predictions[span, half] == 1) & right
                axes.scatter(at[soon], torch.full((int(soon.sum()),), 0.08), s=9, color=colour)
        axes.set(xlabel="sample", ylabel="membrane potential")
        axes.set_title("dots: predicted to fire; red: it did not")
        return figure
    chosen = task.test.nonzero()[:16, 0]
    for i, axes in zip(chosen.tolist(), figure.subplots(2, 8).flat, strict=True):
        axes.imshow(task.x[i].view(4, 4, 2, 2).permute(0, 2, 1, 3).reshape(8, 8), cmap="Greys")
        axes.set(xticks=[], yticks=[])
        right = predictions[i] == task.labels[i]
        axes.set_title(f"{predictions[i]}", color="black" if right else "red", fontsize=9)
    return figure


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = common.options(__doc__, steps=300)
    parser.add_argument("--input", choices=TASKS, default="pixels")
    settings = parser.parse_args(arguments)
    torch.manual_seed(settings.seed)
    task = TASKS[settings.input]()
    model = Classifier(task)
    each = task.labels.dim() == 2
    candidates = (task.train.any(1) if each else task.train).nonzero()[:, 0]
    order = iter(common.batches(len(candidates), 64, settings.seed))

    def loss() -> Tensor:
        chosen = candidates[next(order)]
        logits, labels = model(task.x[chosen]), task.labels[chosen]
        if each:
            logits, labels = logits[task.train[chosen]], labels[task.train[chosen]]
        return F.cross_entropy(logits, labels)

    common.train(model, loss, settings.steps, title=settings.input)
    with torch.no_grad():
        predictions = model(task.x).argmax(-1)
    truth = task.labels[task.test]
    accuracy = (predictions[task.test] == truth).float().mean().item()
    baseline = common.majority(truth)
    print(f"{settings.input}: {int(task.train.sum())} training labels, {len(truth)} held out")
    print(f"held-out accuracy: {accuracy:.1%}; always the commonest label: {baseline:.1%}")
    figure = draw(settings.input, task, predictions)
    common.save(figure, settings.out, f"sequence_classification_{settings.input}.png")
    return {"accuracy": accuracy, "baseline": baseline}


if __name__ == "__main__":
    main()

"""Detection as set prediction: object queries, a decoder without a causal mask, bipartite matching.

As in DETR (Carion et al. 2020, sections 3.1 and 3.2), a fixed number of queries each predict a
class, possibly "nothing", and a centre; training matches predictions to objects at minimum cost
(scipy's linear_sum_assignment), so the order does not matter and no object is predicted twice.

Data: the handwritten digits of scikit-learn, one to three of them pasted on an empty canvas without
overlap; the digits of the test are not used in training. The baseline is predicting the commonest
digit at a random centre.

    python -m examples.set_prediction
"""

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from scipy.optimize import linear_sum_assignment
from sklearn.datasets import load_digits
from torch import Tensor, nn

from examples import common
from fastattn import nn as fnn

CANVAS, DIGIT, MOST, QUERIES = 20, 8, 3, 5
NOTHING = 10
NEAR = 1.5 / CANVAS  # a centre is correct within one and a half pixels


class Scenes:
    """Draws canvases `[B, CANVAS, CANVAS]` with their digits' classes and centres in [0, 1]²."""

    def __init__(self, train: bool, seed: int) -> None:
        digits = load_digits()
        chosen = (torch.arange(len(digits.target)) % 5 != 0) == train
        self.images = torch.tensor(digits.images, dtype=torch.float32)[chosen] / 16.0
        self.labels = torch.tensor(digits.target)[chosen]
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, count: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        canvases = torch.zeros(count, CANVAS, CANVAS)
        classes, centres = [], []
        for canvas in canvases:
            wanted = self._random(1, MOST + 1)
            corners: list[tuple[int, int]] = []
            labels = []
            for _ in range(20):
                y, x = self._random(0, CANVAS - DIGIT + 1), self._random(0, CANVAS - DIGIT + 1)
                if all(abs(y - v) >= DIGIT or abs(x - u) >= DIGIT for v, u in corners):
                    which = self._random(0, len(self.labels))
                    canvas[y : y + DIGIT, x : x + DIGIT] = self.images[which]
                    corners.append((y, x))
                    labels.append(self.labels[which])
                if len(corners) == wanted:
                    break
            classes.append(torch.stack(labels))
            centres.append((torch.tensor(corners) + DIGIT / 2) / CANVAS)
        return canvases, classes, centres

    def _random(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=self.generator))


class Detector(nn.Module):
    """Canvases -> class logits `[B, QUERIES, 11]` and centres `[B, QUERIES, 2]`."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(64, width, 4, stride=2, padding=1),
        )  # fmt: skip
        patches = (CANVAS // 4) ** 2
        self.positions = nn.Parameter(torch.randn(patches, width))
        self.queries = nn.Parameter(torch.randn(QUERIES, width))
        self.transformer = fnn.Transformer(width, 4, 1, 2, 2 * width, 0.0, batch_first=True)
        self.classes = nn.Linear(width, NOTHING + 1)
        self.centres = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, canvases: Tensor) -> tuple[Tensor, Tensor]:
        x = self.patches(canvases[:, None]).flatten(2).transpose(1, 2) + self.positions
        y = self.transformer(x, self.queries.expand(len(x), -1, -1))
        return self.classes(y), self.centres(y).sigmoid()


def match(
    logits: Tensor, centres: Tensor, classes: Tensor, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Indices of matched queries and objects, `[objects]` each: the matching of minimum cost."""
    cost = -logits.softmax(-1)[:, classes] + 5.0 * torch.cdist(centres, places, p=1)
    queries, objects = linear_sum_assignment(cost.detach().numpy())
    return torch.from_numpy(queries), torch.from_numpy(objects)


def set_loss(
    logits: Tensor, centres: Tensor, classes: list[Tensor], places: list[Tensor]
) -> Tensor:
    """Cross-entropy of all queries, unmatched ones as "nothing", and L1 of the matched centres."""
    targets = torch.full(logits.shape[:2], NOTHING)
    distances = []
    for i, (labels, wanted) in enumerate(zip(classes, places, strict=True)):
        queries, objects = match(logits[i], centres[i], labels, wanted)
        targets[i, queries] = labels[objects]
        distances.append(F.l1_loss(centres[i, queries], wanted[objects]))
    weights = torch.ones(NOTHING + 1)
    weights[NOTHING] = 0.3  # most queries are "nothing"
    entropy = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weights)
    return entropy + 5.0 * torch.stack(distances).mean()


def score(logits: Tensor, centres: Tensor, classes: list[Tensor], places: list[Tensor]) -> float:
    """F1 of objects found: the right class within 1.5 pixels."""
    found = predictions = objects = 0
    for i, (labels, wanted) in enumerate(zip(classes, places, strict=True)):
        chosen = logits[i].argmax(-1)
        queries, matched = match(logits[i], centres[i], labels, wanted)
        near = (centres[i, queries] - wanted[matched]).abs().amax(-1) <= NEAR
        found += int((near & (chosen[queries] == labels[matched])).sum())
        predictions += int((chosen != NOTHING).sum())
        objects += len(labels)
    return 2 * found / max(1, predictions + objects)


def guess(scenes: tuple[Tensor, list[Tensor], list[Tensor]]) -> float:
    """The F1 of two predictions per canvas: the commonest digit at random centres."""
    count = len(scenes[1])
    commonest = torch.cat(scenes[1]).bincount().argmax()
    logits = torch.zeros(count, QUERIES, NOTHING + 1)
    logits[:, :2, commonest] = 9.0
    logits[:, 2:, NOTHING] = 9.0
    return score(logits, torch.rand(count, QUERIES, 2), *scenes[1:])


def draw(
    scenes: tuple[Tensor, list[Tensor], list[Tensor]], logits: Tensor, centres: Tensor
) -> Figure:
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    for i, axes in enumerate(figure.subplots(2, 4).flat):
        axes.imshow(scenes[0][i], cmap="Greys")
        for label, (y, x) in zip(logits[i].argmax(-1), centres[i] * CANVAS, strict=True):
            if label != NOTHING:
                axes.text(x - 0.5, y - 5.2, f"{label}", color="red", ha="center", va="center")
                axes.plot(x - 0.5, y - 0.5, "+", color="red")
        axes.set(xticks=[], yticks=[])
    return figure


def main(arguments: list[str] | None = None) -> dict[str, float]:
    settings = common.options(__doc__, steps=1500).parse_args(arguments)
    torch.manual_seed(settings.seed)
    model, scenes = Detector(), Scenes(train=True, seed=settings.seed)

    def loss() -> Tensor:
        canvases, classes, places = scenes.draw(32)
        return set_loss(*model(canvases), classes, places)

    common.train(model, loss, settings.steps, title="training", learning_rate=2e-3)
    test = Scenes(train=False, seed=settings.seed + 1).draw(256)
    with torch.no_grad():
        logits, centres = model(test[0])
    result, baseline = score(logits, centres, *test[1:]), guess(test)
    print(f"256 canvases with {sum(map(len, test[1]))} digits, none of them used in training")
    print(f"F1 of digits found, class and place: {result:.1%}; guessing: {baseline:.1%}")
    common.save(draw(test, logits, centres), settings.out, "set_prediction.png")
    return {"f1": result, "baseline": baseline}


if __name__ == "__main__":
    main()

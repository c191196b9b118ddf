"""Classifies docstrings by package, with a bidirectional LSTM and attention pooling.

Data: the docstrings of some packages of Python's standard library, read from its source files. The
attention that pools the words (Yang et al. 2016, equations 5 to 7) is drawn over them: darker words
have larger weights. The baseline is always predicting the commonest package.

    python -m examples.text_classifier
"""

import ast
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from examples import common

PACKAGES = ("asyncio", "email", "unittest", "tkinter", "multiprocessing", "xml")
LONGEST = 60
UNKNOWN, PADDING = "<unknown>", "<padding>"


def docstrings(package: str) -> list[list[str]]:
    """The words of every docstring of at least five words in a package's files."""
    folder = Path(sysconfig.get_path("stdlib")) / package
    found = []
    for path in sorted(folder.rglob("*.py")):
        if "test" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                words = re.findall(r"[a-z]+", (ast.get_docstring(node) or "").lower())
                # Package names are removed: they would give the label away.
                words = [word for word in words if word not in PACKAGES][:LONGEST]
                if len(words) >= 5:
                    found.append(words)
    return found


class Texts:
    """Docstrings as word numbers `[texts, LONGEST]`, their lengths and packages, split in two."""

    def __init__(self, seed: int) -> None:
        texts = [
            (words, label) for label, name in enumerate(PACKAGES) for words in docstrings(name)
        ]
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
        texts = [texts[i] for i in order]
        self.words = [words for words, _ in texts]
        self.labels = torch.tensor([label for _, label in texts])
        self.lengths = torch.tensor([len(words) for words in self.words])
        self.held_out = len(texts) // 5
        counts = Counter(word for words in self.words[self.held_out :] for word in words)
        self.vocabulary = [PADDING, UNKNOWN, *(word for word, n in counts.items() if n > 1)]
        number = {word: i for i, word in enumerate(self.vocabulary)}
        rows = [[number.get(word, 1) for word in words] for words in self.words]
        self.tokens = torch.tensor([row + [0] * (LONGEST - len(row)) for row in rows])


class Classifier(nn.Module):
    """Embedding, BiLSTM, attention pooling, linear. -> logits `[B, classes]`, weights `[B, S]`."""

    def __init__(self, words: int, classes: int, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width, padding_idx=0)
        self.dropout = nn.Dropout(0.3)
        self.lstm = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.hidden = nn.Linear(width, width)
        self.query = nn.Linear(width, 1, bias=False)
        self.output = nn.Linear(width, classes)

    def forward(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = self.dropout(self.embedding(tokens))
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        states = nn.utils.rnn.pad_packed_sequence(
            self.lstm(packed)[0], True, total_length=tokens.shape[1]
        )[0]
        scores = self.query(torch.tanh(self.hidden(states)))[..., 0]
        real = torch.arange(tokens.shape[1]) < lengths[:, None]
        weights = scores.masked_fill(~real, float("-inf")).softmax(-1)
        pooled = (weights[:, None] @ states)[:, 0]
        return self.output(self.dropout(pooled)), weights


def draw(texts: Texts, weights: Tensor, predictions: Tensor, count: int = 8) -> Figure:
    """The first held-out docstrings, each word shaded by its weight."""
    figure = Figure(figsize=(11, 0.62 * count + 0.4))
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set(xlim=(0, 118), ylim=(count, 0))
    axes.axis("off")
    for row in range(count):
        truth, prediction = PACKAGES[int(texts.labels[row])], PACKAGES[int(predictions[row])]
        label = prediction if truth == prediction else f"{prediction} (is {truth})"
        axes.text(0, row + 0.32, label, fontsize=9, weight="bold", va="center")
        column, line = 0.0, row + 0.72
        for word, weight in zip(texts.words[row], weights[row].tolist(), strict=False):
            shade = min(1.0, weight * 4)
            axes.text(
                column, line, word, fontsize=8, va="center", family="monospace",
                bbox={"color": (1.0, 1.0 - 0.55 * shade, 1.0 - 0.9 * shade), "pad": 1.0},
            )  # fmt: skip
            column += len(word) + 1.2
            if column > 112:
                break
    return figure


def main(arguments: list[str] | None = None) -> dict[str, float]:
    settings = common.options(__doc__, steps=400).parse_args(arguments)
    torch.manual_seed(settings.seed)
    texts = Texts(settings.seed)
    model = Classifier(len(texts.vocabulary), len(PACKAGES))
    test, train = slice(None, texts.held_out), slice(texts.held_out, None)
    tokens, lengths, labels = texts.tokens[train], texts.lengths[train], texts.labels[train]
    order = iter(common.batches(len(labels), 32, settings.seed))

    def loss() -> Tensor:
        chosen = next(order)
        return F.cross_entropy(model(tokens[chosen], lengths[chosen])[0], labels[chosen])

    common.train(model, loss, settings.steps, title="training", learning_rate=4e-3)
    with torch.no_grad():
        logits, weights = model(texts.tokens[test], texts.lengths[test])
    predictions, truth = logits.argmax(-1), texts.labels[test]
    accuracy = (predictions == truth).float().mean().item()
    baseline = common.majority(truth)
    print(f"{len(labels)} docstrings of {', '.join(PACKAGES)}; {len(truth)} held out")
    print(f"held-out accuracy: {accuracy:.1%}; always the commonest package: {baseline:.1%}")
    common.save(draw(texts, weights, predictions), settings.out, "text_classifier.png")
    return {"accuracy": accuracy, "baseline": baseline}


if __name__ == "__main__":
    main()

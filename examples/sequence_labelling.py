"""Syntax colouring of Python with a self-attention encoder: a label for every character.

Data: source files of Python's standard library; the labels come from its tokenizer. The encoder is
given no rule of the language. The baseline is always predicting the commonest label.

    python -m examples.sequence_labelling
"""

import io
import keyword
import sysconfig
import tokenize
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from examples import common
from fastattn import nn as fnn

LABELS = ("other", "name", "keyword", "number", "string", "comment")
FILES = tuple(
    "argparse ast calendar configparser csv dis difflib enum fractions gettext heapq inspect "
    "locale mailbox pickle shlex string tarfile textwrap zipfile".split()
)
WINDOW = 128
CHARACTERS = 128


def label_characters(source: str) -> list[int]:
    """A label for each character of a program."""
    starts = [0]
    for line in source.split("\n"):  # as tokenize does, not at form feeds
        starts.append(starts[-1] + len(line) + 1)
    labels = [0] * len(source)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = {
            tokenize.NUMBER: "number",
            tokenize.STRING: "string",
            tokenize.COMMENT: "comment",
            tokenize.NAME: "keyword" if keyword.iskeyword(token.string) else "name",
        }.get(token.type)
        if kind:
            begin = starts[token.start[0] - 1] + token.start[1]
            end = starts[token.end[0] - 1] + token.end[1]
            labels[begin:end] = [LABELS.index(kind)] * (end - begin)
    return labels


def windows() -> tuple[Tensor, Tensor, list[int]]:
    """Characters and labels `[windows, WINDOW]`, and the file of each."""
    characters, labels, files = [], [], []
    for number, name in enumerate(FILES):
        path = Path(sysconfig.get_path("stdlib"))
        path = next(p for p in (path / f"{name}.py", path / name / "__init__.py") if p.exists())
        source = path.read_text(encoding="utf-8")
        found = label_characters(source)
        for start in range(0, len(source) - WINDOW, WINDOW):
            piece = source[start : start + WINDOW]
            characters.append([min(ord(c), CHARACTERS - 1) for c in piece])
            labels.append(found[start : start + WINDOW])
            files.append(number)
    return torch.tensor(characters), torch.tensor(labels), files


class Tagger(nn.Module):
    """Characters `[B, S]` -> logits `[B, S, labels]`."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CHARACTERS, width)
        # A convolution first mixes neighbouring characters, as words are made of them.
        self.neighbours = nn.Conv1d(width, width, 5, padding=2)
        self.positions = fnn.LearnedPositionalEncoding(width, WINDOW)
        layer = fnn.TransformerEncoderLayer(
            width, 4, 2 * width, 0.0, batch_first=True, norm_first=True
        )
        self.encoder = fnn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output = nn.Linear(width, len(LABELS))

    def forward(self, characters: Tensor) -> Tensor:
        x = self.embedding(characters)
        x = x + self.neighbours(x.transpose(1, 2)).transpose(1, 2)
        return self.output(self.encoder(self.positions(x)))


def draw(characters: Tensor, labels: Tensor, predictions: Tensor) -> Figure:
    """A window coloured by the encoder; wrong labels are underlined."""
    figure = Figure(figsize=(9, 3.2))
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.96))
    axes.set(xlim=(0, 64), ylim=(9, 0))
    axes.axis("off")
    for i, label in enumerate(LABELS):
        axes.text(11 * i, 0.5, label, color=common.COLOURS[i], weight="bold", fontsize=9)
    row, column = 2.0, 0
    for code, truth, prediction in zip(
        *(x.tolist() for x in (characters, labels, predictions)), strict=True
    ):
        if chr(code) == "\n" or column > 62:
            row, column = row + 1, 0
        if chr(code) != "\n":
            axes.text(column, row, chr(code), color=common.COLOURS[prediction], family="monospace")
            if truth != prediction and chr(code) != " ":
                axes.plot([column, column + 0.8], [row + 0.15] * 2, color="red")
            column += 1
    return figure


def main(arguments: list[str] | None = None) -> dict[str, float]:
    settings = common.options(__doc__, steps=400).parse_args(arguments)
    torch.manual_seed(settings.seed)
    characters, labels, files = windows()
    held_out = torch.tensor(files) % 5 == 4  # whole files
    model = Tagger()
    train_x, train_y = characters[~held_out], labels[~held_out]
    order = iter(common.batches(len(train_x), 24, settings.seed))

    def loss() -> Tensor:
        chosen = next(order)
        return F.cross_entropy(model(train_x[chosen]).flatten(0, 1), train_y[chosen].flatten())

    common.train(model, loss, settings.steps, title="training")
    test_x, test_y = characters[held_out][:400], labels[held_out][:400]
    with torch.no_grad():
        predictions = torch.cat([model(part).argmax(-1) for part in test_x.split(64)])
    accuracy, baseline = (predictions == test_y).float().mean().item(), common.majority(test_y)
    names = [name for i, name in enumerate(FILES) if i % 5 == 4]
    print(f"{len(train_x)} windows of {WINDOW} characters; held out: {', '.join(names)}")
    print(f"characters labelled correctly: {accuracy:.1%}; always the commonest: {baseline:.1%}")
    middle = len(test_x) // 2
    figure = draw(test_x[middle], test_y[middle], predictions[middle])
    common.save(figure, settings.out, "sequence_labelling.png")
    return {"accuracy": accuracy, "baseline": baseline}


if __name__ == "__main__":
    main()

"""Recurrent encoder-decoders and the Transformer, on the same sentence pairs.

Three recurrent models, each with a GRU that reads the source in reverse and a GRU that writes the
target: "plain" passes one vector at the start (Sutskever et al. 2014); "context" passes that vector
at every step (Cho et al. 2014); "attention" attends at every step to all source states by additive
scores (Bahdanau et al. 2015, section 3.1). All have about the same size and are trained for the
same number of updates on the same batches.

Data: the English-French message catalogues inside two published packages, as for `fastattn demo`
(downloaded once). Results are the loss and BLEU on held-out sentences; a baseline is the BLEU of
the untranslated source.

    python -m examples.rnn_translation
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from examples import common
from fastattn.seq2seq.catalogues import load_catalogue_pairs
from fastattn.seq2seq.data import BEGIN, END, PAD, Batch, Example, collate, training_batches
from fastattn.seq2seq.generation import bleu
from fastattn.seq2seq.model import ModelConfig, Seq2SeqTransformer
from fastattn.seq2seq.runs import prepare_text

WIDTH, LONGEST = 128, 24


class Recurrent(nn.Module):
    """GRU encoder-decoder. form: "plain", "context" or "attention"."""

    def __init__(self, vocabulary: int, form: str) -> None:
        super().__init__()
        self.form = form
        self.embedding = nn.Embedding(vocabulary, WIDTH, padding_idx=PAD)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.decoder = nn.GRUCell(WIDTH if form == "plain" else 2 * WIDTH, WIDTH)
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.score = nn.Linear(WIDTH, 1, bias=False)
        self.output = nn.Linear(WIDTH if form == "plain" else 2 * WIDTH, vocabulary)
        self.weights: list[Tensor] = []  # of the last forward, [B, S] per step

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Teacher forcing: source `[B, S]`, target `[B, T]` with BEGIN first -> logits."""
        lengths = (source != PAD).sum(1)
        # Reversed, so that the first words are read last.
        reverse = (lengths[:, None] - 1 - torch.arange(source.shape[1])) % source.shape[1]
        x = self.embedding(source).gather(1, reverse[..., None].expand(-1, -1, WIDTH))
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, enforce_sorted=False)
        states, last = self.encoder(packed)
        states = nn.utils.rnn.pad_packed_sequence(states, True, total_length=source.shape[1])[0]
        states = states.gather(1, reverse[..., None].expand(-1, -1, WIDTH))
        keys, blocked = self.key(states), source == PAD
        state = summary = last[0]
        self.weights, outputs = [], []
        for x in self.embedding(target).unbind(1):
            context = summary
            if self.form == "attention":
                scores = self.score(torch.tanh(self.query(state)[:, None] + keys))[..., 0]
                weights = scores.masked_fill(blocked, -math.inf).softmax(-1)
                context = (weights[:, None] @ states)[:, 0]
                self.weights.append(weights.detach())
            if self.form == "plain":
                state = self.decoder(x, state)
                outputs.append(state)
            else:
                state = self.decoder(torch.cat([x, context], -1), state)
                outputs.append(torch.cat([state, context], -1))
        return self.output(torch.stack(outputs, 1))


class Attentive(nn.Module):
    """A Transformer of about the same size."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        config = ModelConfig(
            vocabulary, width=WIDTH, heads=4, encoder_layers=2, decoder_layers=2,
            ffn_width=2 * WIDTH, dropout=0.0, max_length=LONGEST,
        )  # fmt: skip
        self.model = Seq2SeqTransformer(config)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.model(source, target, source == PAD)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "plain": lambda vocabulary: Recurrent(vocabulary, "plain"),
    "context": lambda vocabulary: Recurrent(vocabulary, "context"),
    "attention": lambda vocabulary: Recurrent(vocabulary, "attention"),
    "transformer": Attentive,
}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch.source, batch.target_in)
    return F.cross_entropy(logits.flatten(0, 1), batch.target_out.flatten(), ignore_index=PAD)


@torch.no_grad()
def translate(model: nn.Module, source: Tensor) -> list[list[int]]:
    """Greedy search that recomputes the whole prefix for every token: simple and slow."""
    target = torch.full((len(source), 1), BEGIN)
    for _ in range(LONGEST):
        following = model(source, target)[:, -1].argmax(-1)
        target = torch.cat([target, following[:, None]], 1)
        if bool((target == END).any(1).all()):
            break
    rows = target[:, 1:].tolist()
    return [row[: row.index(END)] if END in row else row for row in rows]


@torch.no_grad()
def held_out_loss(model: nn.Module, examples: Sequence[Example]) -> float:
    """Nats per token."""
    total, tokens = 0.0, 0
    for i in range(0, len(examples), 64):
        batch = collate(examples[i : i + 64])
        count = int((batch.target_out != PAD).sum())
        total += loss_of(model, batch).item() * count
        tokens += count
    return total / tokens


def unigram_loss(train: Sequence[Example], valid: Sequence[Example]) -> float:
    """Nats per token of a prediction from token frequencies."""
    train_tokens = torch.tensor([token for example in train for token in example.target])
    valid_tokens = torch.tensor([token for example in valid for token in example.target])
    counts = train_tokens.bincount(minlength=int(valid_tokens.max()) + 1) + 1.0
    return -(counts / counts.sum()).log()[valid_tokens].mean().item()


def draw(
    losses: dict[str, list[float]], weights: Tensor, source: list[str], target: list[str]
) -> Figure:
    """Loss curves, and the attention of the recurrent decoder."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for (name, values), colour in zip(losses.items(), common.COLOURS, strict=False):
        smooth = torch.tensor(values).unfold(0, min(20, len(values)), 1).mean(-1)
        left.plot(smooth, color=colour, label=name)
    left.set(xlabel="update", ylabel="loss (nats per token)")
    left.legend(frameon=False)
    right.imshow(weights, cmap="Blues", aspect="auto")
    right.set_xticks(range(len(source)), source, rotation=60, ha="right")
    right.set_yticks(range(len(target)), target)
    right.set_title("attention of the recurrent decoder")
    return figure


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = common.options(__doc__, steps=500)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    settings = parser.parse_args(arguments)
    pairs = load_catalogue_pairs().pairs
    text = prepare_text(pairs, held_out=200, max_length=LONGEST, vocabulary=2000)
    copied = bleu([p.source for p in text.test], [p.target for p in text.test]).score
    results = {
        "untranslated source": {"bleu": copied},
        "token frequencies": {"loss": unigram_loss(text.train, text.valid)},
    }
    losses: dict[str, list[float]] = {}
    attention = None
    encoded = text.tokenizer.encode_all([p.source for p in text.test])
    sources = collate([Example([*ids, END], [END]) for ids in encoded]).source
    for name in settings.models:
        torch.manual_seed(settings.seed)
        model = MODELS[name](text.tokenizer.vocabulary)
        batches = training_batches(text.train, token_budget=1500, seed=settings.seed)

        def loss(model: nn.Module = model, batches=batches) -> Tensor:  # type: ignore[no-untyped-def]
            return loss_of(model, next(batches)[0])

        losses[name] = common.train(model, loss, settings.steps, title=name, learning_rate=3e-3)
        predictions = translate(model, sources)
        score = bleu(
            [text.tokenizer.decode(ids) for ids in predictions], [p.target for p in text.test]
        )
        results[name] = {"loss": held_out_loss(model, text.valid), "bleu": score.score}
        if name == "attention":
            model(sources[:1], torch.tensor([[BEGIN, *predictions[0]]]))
            real = sources[0][sources[0] != PAD].tolist()
            weights = torch.cat(model.weights)[:, : len(real)]  # type: ignore[arg-type]
            attention = (
                weights,
                text.tokenizer.tokens(real),
                text.tokenizer.tokens([*predictions[0], END][: len(weights)]),
            )
    for name, figures in results.items():
        print(f"{name:20s}" + "".join(f"  {key} {value:6.2f}" for key, value in figures.items()))
    if attention is not None:
        common.save(draw(losses, *attention), settings.out, "rnn_translation.png")
    return results


if __name__ == "__main__":
    main()

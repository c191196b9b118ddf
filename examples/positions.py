"""Positions in a translation model: added to the embeddings, or in the scores of the attention.

One small Transformer for each kind: sinusoids (Vaswani et al. 2017) and learned vectors are added
to the embeddings; ALiBi (Press et al. 2022), T5's table (Raffel et al. 2020) and rotary positions
(Su et al. 2021) enter the scores of the self-attentions. All are trained for the same number of
updates on the same batches of short sentences. The figure shows the loss on held-out sentences as
short as those of training, during training, and afterwards on longer ones.

Data: the English-French message catalogues inside two published packages, as for `fastattn demo`
(downloaded once). A baseline is the loss of a prediction from token frequencies.

    python -m examples.positions
"""

import torch
from matplotlib.figure import Figure

from examples import common
from examples.rnn_translation import unigram_loss
from fastattn.seq2seq.catalogues import load_catalogue_pairs
from fastattn.seq2seq.data import Example, encode_pairs
from fastattn.seq2seq.model import POSITIONS, ModelConfig, Seq2SeqTransformer
from fastattn.seq2seq.runs import prepare_text
from fastattn.seq2seq.training import TrainingConfig, train, validation_loss

SHORT, LONGEST = 16, 48  # tokens, END included: in training, and in the test of longer sentences
CPU = torch.device("cpu")
Curve = list[tuple[int, float]]  # (update, loss)


def draw(curves: dict[str, Curve], results: dict[str, dict[str, float]]) -> Figure:
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    for (name, curve), colour in zip(curves.items(), common.COLOURS, strict=False):
        left.plot(*zip(*curve, strict=True), color=colour, marker="o", markersize=3, label=name)
    left.set(xlabel="update", ylabel="nats per token")
    left.set_title(f"loss on held-out sentences of at most {SHORT} tokens", fontsize=10)
    left.legend(frameon=False)
    longer = {name: losses["longer"] for name, losses in results.items()}
    colours = ["0.8", *common.COLOURS[: len(curves)]]  # the baseline comes first
    right.bar_label(
        right.barh(list(longer), list(longer.values()), color=colours), fmt="%.2f", padding=3
    )
    right.set(xlabel="nats per token", xlim=(0, 1.15 * max(longer.values())))
    right.invert_yaxis()
    right.set_title(f"on sentences of {SHORT + 1} to {LONGEST} tokens", fontsize=10)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    parser = common.options(__doc__, steps=600)
    parser.add_argument("--kinds", nargs="+", choices=POSITIONS, default=list(POSITIONS))
    settings = parser.parse_args(arguments)
    pairs = load_catalogue_pairs().pairs
    text = prepare_text(pairs, held_out=500, max_length=SHORT, vocabulary=2000)
    held_out = [*text.splits.valid, *text.splits.test]
    longer = [
        e
        for e in encode_pairs(held_out, text.tokenizer, max_length=LONGEST)
        if max(len(e.source), len(e.target)) > SHORT
    ]
    frequencies = {"short": unigram_loss(text.train, text.valid)}
    frequencies["longer"] = unigram_loss(text.train, longer)
    results = {"token frequencies": frequencies}
    curves: dict[str, Curve] = {}
    config = TrainingConfig(
        steps=settings.steps, batch_tokens=2000, learning_rate=3e-3, smoothing=0.0,
        warmup_steps=settings.steps // 10, valid_every=max(1, settings.steps // 12),
        seed=settings.seed,
    )  # fmt: skip

    def loss(model: Seq2SeqTransformer, examples: list[Example]) -> float:
        with torch.no_grad():
            return validation_loss(model, examples, config, device=CPU)

    for name in settings.kinds:
        torch.manual_seed(settings.seed)
        model = Seq2SeqTransformer(
            ModelConfig(
                text.tokenizer.vocabulary, width=128, heads=4, encoder_layers=2,
                decoder_layers=2, ffn_width=256, max_length=LONGEST, positions=name,
            )
        )  # fmt: skip
        result = train(model, text.train, text.valid, config, device=CPU, description=name)
        curves[name] = result.validations
        results[name] = {"short": loss(model, text.valid), "longer": loss(model, longer)}
    for name, losses in results.items():
        print(f"{name:20s}" + "".join(f"  {key} {value:5.2f}" for key, value in losses.items()))
    common.save(draw(curves, results), settings.out, "positions.png")
    return results


if __name__ == "__main__":
    main()

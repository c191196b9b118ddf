"""Self-critical training, scheduled sampling, guided attention, packed batches: each compared with
its formula, and its effect.
"""

import dataclasses
import math

import pytest
import torch
from seq2seq_samples import CPU, SMALL, random_examples, small_model, toy_training

from fastattn.seq2seq import scheduled_sampling, sequence_training, training
from fastattn.seq2seq.data import BEGIN, END, PAD, Example, collate
from fastattn.seq2seq.generation import generate
from fastattn.seq2seq.losses import guided_attention_loss
from fastattn.seq2seq.model import Seq2SeqTransformer, record_attention
from fastattn.seq2seq.schedules import DECAYS, truth_share
from fastattn.seq2seq.sequence_training import self_critical_loss, token_bleu
from fastattn.seq2seq.training import TrainingConfig, train


def test_the_reward_is_sentence_bleu():
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU(smooth_method="add-k", smooth_value=1, effective_order=True)
    hypothesis, reference = [5, 6, 7, 8, 9, 5], [5, 6, 7, 9, 8, 5, 4]
    words = [" ".join(f"w{i}" for i in ids) for ids in (hypothesis, reference)]
    expected = metric.sentence_score(words[0], [words[1]]).score / 100
    assert token_bleu(hypothesis, reference) == pytest.approx(expected)
    assert 0.2 < expected < 0.8
    assert token_bleu(reference, reference) == pytest.approx(1.0)
    assert token_bleu([], [4]) == token_bleu([4], []) == 0.0
    assert token_bleu([], []) == 1.0


def test_the_self_critical_loss_equals_its_formula(monkeypatch):
    model = small_model(tied=False, seed=7, dropout=0.3)
    batch = collate(random_examples(8, seed=3))
    found = []
    real = sequence_training.generate

    def recording(*args, **kwargs):
        found.append(real(*args, **kwargs))
        return found[-1]

    def reward(hypothesis, reference):
        return float(len(hypothesis)) - 0.5 * len(reference)

    monkeypatch.setattr(sequence_training, "generate", recording)
    state = torch.get_rng_state()
    loss = self_critical_loss(model, batch, reward=reward)
    assert model.training
    sampled, greedy = found
    # Probabilities in training mode: the same dropout is drawn again.
    torch.set_rng_state(state)
    torch.randint(2**31, ())
    targets = [h.tokens + [END] * h.ended for (h,) in sampled]
    again = collate([Example(s, t) for s, t in zip(batch.source.tolist(), targets, strict=True)])
    logits = model(batch.source, again.target_in, batch.source_padding)
    # The distribution of samples: PAD and BEGIN, the tokens before END, have probability 0.
    log_p = logits[..., END:].log_softmax(-1)
    total = 0.0
    for b, ((one,), (base,)) in enumerate(zip(sampled, greedy, strict=True)):
        advantage = len(one.tokens) - len(base.tokens)
        for t, token in enumerate(targets[b]):
            total -= advantage * log_p[b, t, token - END].item()
    assert len({len(h.tokens) for (h,) in sampled}) > 2
    assert loss.item() == pytest.approx(total / sum(map(len, targets)), rel=1e-4)
    # If all samples have the reward of the greedy result, the gradient is 0.
    equal = self_critical_loss(model, batch, reward=lambda *_: 0.3)
    (gradient,) = torch.autograd.grad(equal, model.head.weight)
    assert gradient.abs().max() == 0


def test_the_last_updates_reward_sequences(monkeypatch):
    model, batch = small_model(), collate(random_examples(5))
    config = toy_training(steps=10, sequence_steps=3, sequence_weight=0.75)
    monkeypatch.setattr(training, "self_critical_loss", lambda model, batch: torch.tensor(100.0))
    plain = training.batch_loss(model, batch, config, step=7)
    rewarded = training.batch_loss(model, batch, config, step=8)
    assert rewarded.item() == pytest.approx(75.0 + 0.25 * plain.item())


@pytest.mark.slow
def test_sequence_training_raises_the_sampled_bleu():
    """60 updates with only BLEU improve on 25 with cross-entropy."""
    examples = [Example(e.source, e.source) for e in random_examples(60, vocabulary=12)]
    model = Seq2SeqTransformer(dataclasses.replace(SMALL, vocabulary=12, width=32))
    batch = collate(examples)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    references = [e.target[:-1] for e in examples]

    def expected_reward() -> float:
        torch.manual_seed(0)
        model.eval()
        limits = [len(r) + 5 for r in references]
        total = 0.0
        for seed in range(4):
            found = generate(
                model, batch.source, batch.source_padding, max_lengths=limits,
                strategy=sequence_training.Sampling(seed=seed),
            )  # fmt: skip
            total += sum(token_bleu(h.tokens, r) for (h,), r in zip(found, references, strict=True))
        model.train()
        return total / len(references) / 4

    config = toy_training(smoothing=0.0)
    for _ in range(25):
        optimizer.zero_grad()
        training.cross_entropy(model, batch, config).backward()
        optimizer.step()
    before = expected_reward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(60):
        optimizer.zero_grad()
        self_critical_loss(model, batch).backward()
        optimizer.step()
    after = expected_reward()
    assert 0.1 < before < 0.9
    assert after > before + 0.04, (before, after)


# -- Scheduled sampling ----------------------------------------------------------------------------
@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_the_share_of_true_inputs_is_that_of_bengio_et_al(floor):
    def shares(decay: str) -> list[float]:
        return [
            (truth_share(step, total_steps=1000, decay=decay, floor=floor) - floor) / (1 - floor)
            for step in (0, 250, 500, 1000, 2000)
        ]

    assert shares("linear") == pytest.approx([1.0, 0.75, 0.5, 0.0, 0.0])
    k = 0.01 ** (1 / 1000)
    assert shares("exponential") == pytest.approx([1.0, k**250, k**500, 0.01, 0.01])
    (k,) = (k / 1000 for k in range(1000, 200_000) if k / 1000 * math.log(k / 1000) <= 500 <
            (k + 1) / 1000 * math.log((k + 1) / 1000))  # fmt: skip
    sigmoid = [k / (k + math.exp(step / k)) for step in (0, 250, 500, 1000, 1000)]
    assert shares("inverse-sigmoid") == pytest.approx(sigmoid, abs=1e-4)
    for decay in DECAYS:
        assert shares(decay) == sorted(shares(decay), reverse=True)
    with pytest.raises(ValueError, match=r"decay must be one of .* got 'cubic'"):
        shares("cubic")


@torch.no_grad()
def test_inputs_are_drawn_from_the_models_distribution(monkeypatch):
    """If draws are replaced by the likeliest token, drawing all inputs is greedy decoding."""
    model = small_model(tied=False, seed=7).train()
    batch = collate(random_examples(6))
    monkeypatch.setattr(
        scheduled_sampling, "_draw", lambda logits: logits[..., END:].argmax(-1) + END
    )
    drawn = scheduled_sampling.sequential_inputs(model, batch, 0.0)
    assert model.training
    model.eval()
    logits = model(batch.source, drawn, batch.source_padding)
    best = logits[..., END:].argmax(-1) + END
    real = (batch.target_in != PAD) & (batch.target_in != BEGIN)
    assert torch.equal(drawn[:, 1:][real[:, 1:]], best[:, :-1][real[:, 1:]])
    assert torch.equal(drawn[~real], batch.target_in[~real])
    assert not torch.equal(drawn, batch.target_in)
    # One parallel pass draws from the pass over the truth; with as many passes as tokens, the
    # result is that of sequential drawing.
    logits = model(batch.source, batch.target_in, batch.source_padding)
    best = logits[..., END:].argmax(-1) + END
    one_pass = scheduled_sampling.parallel_inputs(model.train(), batch, 0.0)
    assert model.training
    assert torch.equal(one_pass[:, 1:][real[:, 1:]], best[:, :-1][real[:, 1:]])
    assert not torch.equal(one_pass, drawn)
    many_passes = scheduled_sampling.parallel_inputs(
        model, batch, 0.0, passes=batch.target_in.shape[1]
    )
    assert torch.equal(many_passes, drawn)


@pytest.mark.parametrize("form", ["sequential", "parallel"])
def test_inputs_are_true_with_their_share(form):
    mix = getattr(scheduled_sampling, f"{form}_inputs")
    model = small_model(tied=False)
    batch = collate(random_examples(400))
    real = (batch.target_in != PAD) & (batch.target_in != BEGIN)
    assert torch.equal(mix(model, batch, 1.0), batch.target_in)
    same = (mix(model, batch, 0.6) == batch.target_in)[real].float().mean().item()
    # A drawn token is the true one by chance, about once in 28 times.
    expected = 0.6 + 0.4 / 28
    assert same == pytest.approx(expected, abs=4 * (0.25 / int(real.sum())) ** 0.5)
    assert not torch.equal(mix(model, batch, 0.6), mix(model, batch, 0.6))
    torch.manual_seed(3)
    first = mix(model, batch, 0.6)
    torch.manual_seed(3)
    assert torch.equal(mix(model, batch, 0.6), first)
    assert first[real].min() >= END
    with pytest.raises(ValueError, match=r"truth_share must lie in \[0, 1\], got 1.5"):
        mix(model, batch, 1.5)


def test_scheduled_sampling_changes_the_inputs_of_the_loss(monkeypatch):
    model = small_model()
    batch = collate(random_examples(5))
    config = toy_training(scheduled_sampling="parallel", truth_floor=0.25, steps=11)
    shares = []

    def mix(model, batch, share):
        shares.append(share)
        return torch.full_like(batch.target_in, 9)

    monkeypatch.setattr(training, "parallel_inputs", mix)
    loss = training.batch_loss(model, batch, config, step=6)
    nines = dataclasses.replace(batch, target_in=torch.full_like(batch.target_in, 9))
    torch.testing.assert_close(loss, training.cross_entropy(model, nines, config))
    assert shares == [pytest.approx(1 - 0.75 * 5 / 11)]


# -- Guided attention ------------------------------------------------------------------------------
def test_guided_attention_equals_its_formula():
    weights = torch.rand(2, 3, 5, 4)  # [B, H, T, N]
    target_lengths, source_lengths = torch.tensor([5, 2]), torch.tensor([3, 4])
    total = count = 0.0
    for b in range(2):
        T, N = int(target_lengths[b]), int(source_lengths[b])
        for t in range(T):
            for n in range(N):
                w = 1 - math.exp(-((n / N - t / T) ** 2) / (2 * 0.3**2))
                total += w * weights[b, :, t, n].sum().item()
                count += 3
    loss = guided_attention_loss(weights, target_lengths, source_lengths, width=0.3)
    assert loss.item() == pytest.approx(total / count, rel=1e-5)
    diagonal = torch.eye(6).expand(1, 2, 6, 6)
    whole = torch.tensor([6])
    assert guided_attention_loss(diagonal, whole, whole) == 0
    assert guided_attention_loss(diagonal.flip(-1), whole, whole) > 0.1


def test_guided_attention_moves_the_weights_to_the_diagonal():
    examples = [Example([*e.source[:-1], END], e.source) for e in random_examples(40)]
    losses_after = {}
    for weight in (0.0, 50.0):
        model = small_model()
        config = toy_training(steps=50, guided_attention=weight, learning_rate=1e-2)
        train(model, examples, [], config, device=CPU, show=False)
        batch = collate(examples)
        with torch.no_grad(), record_attention(model, only="multihead_attn") as weights:
            model.eval()(batch.source, batch.target_in, batch.source_padding)
        assert set(weights) == {f"decoder.layers.{i}.multihead_attn" for i in range(2)}
        lengths = (batch.target_out != PAD).sum(1), (~batch.source_padding).sum(1)
        losses_after[weight] = sum(
            float(guided_attention_loss(w, *lengths)) for w in weights.values()
        )
    assert losses_after[50.0] < 0.7 * losses_after[0.0]
    # Added to cross-entropy only in training: validation compares models by their tokens.
    batch, model = collate(examples[:5]), small_model()
    plain, guided = toy_training(), toy_training(guided_attention=2.0)
    losses = [training.cross_entropy(model, batch, config).item() for config in (plain, guided)]
    assert losses[1] > losses[0]
    model.eval()
    losses = [training.cross_entropy(model, batch, config).item() for config in (plain, guided)]
    assert losses[1] == losses[0]


# -- Packed batches --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("smoothing", "positions"),
    [(0.0, "sinusoidal"), (0.1, "sinusoidal"), (0.1, "alibi"), (0.1, "t5"), (0.1, "rotary")],
)
def test_packed_losses_and_gradients_are_the_padded_ones(smoothing, positions):
    batch = collate(random_examples(7))
    assert batch.source_padding.any()
    outcomes = []
    for packed in (False, True):
        model = small_model(tied=True, seed=3, positions=positions).train()
        config = TrainingConfig(packed=packed, smoothing=smoothing)
        loss = training.cross_entropy(model, batch, config)
        outcomes.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for padded, packed in zip(*outcomes, strict=True):
        torch.testing.assert_close(packed, padded, atol=2e-6, rtol=1e-4)


def test_a_packed_batch_runs_on_real_tokens_only():
    batch = collate(random_examples(7))
    model, rows = small_model(tied=True, seed=3), []
    layers = (*model.transformer.encoder.layers, *model.transformer.decoder.layers)
    for layer in layers:
        layer.linear1.register_forward_hook(lambda module, args, y: rows.append(y.shape[0]))
    logits, targets = model.forward_packed(batch)
    source, target = sum(batch.source_lengths), sum(batch.target_lengths)
    assert rows == [source] * (len(layers) // 2) + [target] * (len(layers) // 2)
    assert logits.shape[0] == targets.shape[0] == target
    assert not (targets == PAD).any()


@pytest.mark.parametrize(("options", "why"), [
    ({"copy": True}, "copies source tokens"),
    ({"norm": "power"}, "has power norms"),
    ({"memory_layers": "same"}, "reads the encoder's layers"),
])  # fmt: skip
def test_models_that_cannot_be_packed_raise_the_reason(options, why):
    model = Seq2SeqTransformer(dataclasses.replace(SMALL, **options))
    with pytest.raises(ValueError, match=f"packed must be False for a model that {why}"):
        training.require_trainable(model, TrainingConfig(packed=True))
    with pytest.raises(ValueError, match=f"not supported for a model that {why}"):
        model.forward_packed(collate(random_examples(3)))


def test_pytorchs_transformer_and_guided_attention_are_not_packed():
    model = Seq2SeqTransformer(SMALL, torch.nn.Transformer)
    with pytest.raises(ValueError, match=r"for a model that has a torch\.nn.*Transformer"):
        training.require_trainable(model, TrainingConfig(packed=True))
    with pytest.raises(ValueError, match="packed must be False with guided_attention"):
        TrainingConfig(packed=True, guided_attention=1.0)

"""Training options: each compared with its formula written out, and all of them repeated and
resumed.
"""

import dataclasses
import math

import pytest
import torch
from seq2seq_samples import CPU, SMALL, random_examples, small_model, toy_training

from fastattn.seq2seq import checkpoint, scheduled_sampling, sequence_training, training
from fastattn.seq2seq.data import BEGIN, END, PAD, Example, collate
from fastattn.seq2seq.generation import generate, greedy_decode
from fastattn.seq2seq.losses import guided_attention_loss
from fastattn.seq2seq.model import ModelConfig, Seq2SeqTransformer, record_attention
from fastattn.seq2seq.pointer_generator import PointerGenerator
from fastattn.seq2seq.schedules import DECAYS, truth_share
from fastattn.seq2seq.sequence_training import self_critical_loss, token_bleu
from fastattn.seq2seq.training import TrainingConfig, train

# Scheduled sampling


@pytest.mark.parametrize("floor", [0.0, 0.3])
def test_the_share_of_true_inputs_falls_as_bengio_has_it(floor):
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
def test_drawn_inputs_are_the_models_own(monkeypatch):
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
    once = scheduled_sampling.parallel_inputs(model.train(), batch, 0.0)
    assert model.training
    assert torch.equal(once[:, 1:][real[:, 1:]], best[:, :-1][real[:, 1:]])
    assert not torch.equal(once, drawn)
    often = scheduled_sampling.parallel_inputs(model, batch, 0.0, passes=batch.target_in.shape[1])
    assert torch.equal(often, drawn)


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
    seen = []

    def mix(model, batch, share):
        seen.append(share)
        return torch.full_like(batch.target_in, 9)

    monkeypatch.setattr(training, "parallel_inputs", mix)
    loss = training.batch_loss(model, batch, config, step=6)
    nines = dataclasses.replace(batch, target_in=torch.full_like(batch.target_in, 9))
    torch.testing.assert_close(loss, training.cross_entropy(model, nines, config))
    assert seen == [pytest.approx(1 - 0.75 * 5 / 11)]


# Guided attention


def test_guided_attention_is_its_formula():
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


def test_guided_attention_pulls_to_the_diagonal():
    examples = [Example([*e.source[:-1], END], e.source) for e in random_examples(40)]
    strayed = {}
    for weight in (0.0, 50.0):
        model = small_model()
        config = toy_training(steps=50, guided_attention=weight, learning_rate=1e-2)
        train(model, examples, [], config, device=CPU, show=False)
        batch = collate(examples)
        with torch.no_grad(), record_attention(model, only="multihead_attn") as weights:
            model.eval()(batch.source, batch.target_in, batch.source_padding)
        assert set(weights) == {f"decoder.layers.{i}.multihead_attn" for i in range(2)}
        lengths = (batch.target_out != PAD).sum(1), (~batch.source_padding).sum(1)
        strayed[weight] = sum(float(guided_attention_loss(w, *lengths)) for w in weights.values())
    assert strayed[50.0] < 0.7 * strayed[0.0]
    # Added to cross-entropy only in training: validation compares models by their tokens.
    batch, model = collate(examples[:5]), small_model()
    plain, guided = toy_training(), toy_training(guided_attention=2.0)
    losses = [training.cross_entropy(model, batch, config).item() for config in (plain, guided)]
    assert losses[1] > losses[0]
    model.eval()
    losses = [training.cross_entropy(model, batch, config).item() for config in (plain, guided)]
    assert losses[1] == losses[0]


# Whole sequences


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


def test_the_self_critical_loss_is_its_formula(monkeypatch):
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


# Copying


def test_the_pointer_generator_is_its_formula():
    torch.manual_seed(0)
    head = PointerGenerator(8)
    hidden, memory, logits = torch.randn(2, 3, 8), torch.randn(2, 5, 8), torch.randn(2, 3, 11)
    source = torch.tensor([[4, 7, 4, 9, 2], [3, 3, 2, 0, 0]])
    padding = source == PAD
    log_p = head(hidden, logits, memory, head.keys(memory), source, padding)
    for b in range(2):
        S = int((~padding[b]).sum())
        for t in range(3):
            scores = head.key(memory[b, :S]) @ head.query(hidden[b, t]) / math.sqrt(8)
            a = scores.softmax(0)
            context = a @ memory[b, :S]
            p_gen = head.generate(torch.cat([context, hidden[b, t]])).sigmoid()
            p = p_gen * logits[b, t].softmax(0)
            for i in range(S):
                p[source[b, i]] += (1 - p_gen[0]) * a[i]
            torch.testing.assert_close(log_p[b, t].exp(), p)
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(2, 3))
    # A word that the source lacks and whose probability is 0 in fp32.
    logits = torch.where(torch.arange(11) == 10, -1e4, logits).requires_grad_()
    log_p = head(hidden, logits, memory, head.keys(memory), source, padding)
    log_p[..., 10].sum().backward()
    assert log_p.isfinite().all() and logits.grad.isfinite().all()


def test_copying_learns_unseen_words():
    """Targets repeat the source; half of the vocabulary is never seen in training."""
    rare = random_examples(30, vocabulary=60, seed=9)
    rare = [Example([30 + t // 2 if t != END else t for t in e.source], []) for e in rare]
    seen = [Example(e.source, e.source) for e in random_examples(150, vocabulary=30)]
    right = {}
    for copy in (False, True):
        torch.manual_seed(0)
        config = dataclasses.replace(SMALL, vocabulary=60, width=32, copy=copy)
        model = Seq2SeqTransformer(config)
        schedule = TrainingConfig(
            steps=120, batch_tokens=500, learning_rate=5e-3, warmup_steps=10, valid_every=1000
        )
        train(model, seen, [], schedule, device=CPU, show=False)
        batch = collate([Example(e.source, [END]) for e in rare])
        limits = [len(e.source) for e in rare]
        decoded = greedy_decode(
            model.eval(), batch.source, batch.source_padding, max_lengths=limits
        )
        tokens = [
            a == b
            for found, e in zip(decoded, rare, strict=True)
            for a, b in zip(found, e.source[:-1], strict=False)
        ]
        right[copy] = sum(tokens) / sum(len(e.source) - 1 for e in rare)
    assert right[False] < 0.1 and right[True] > 0.3, right


# How long, how much at once


def test_accumulated_batches_are_one_batch():
    examples = random_examples(12)
    config = toy_training(clip=1e9)
    results = []
    for groups in ([examples], [examples[:3], examples[3:4], examples[4:]]):
        model = small_model()
        optimizer = training.make_optimizer(model, config, CPU)
        batches = [collate(group) for group in groups]
        loss, norm = training.update(model, optimizer, batches, 1e-3, config)
        results.append((loss.item(), norm.item(), [p.grad.clone() for p in model.parameters()]))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-4)
    for one, many in zip(results[0][2], results[1][2], strict=True):
        torch.testing.assert_close(one, many, rtol=1e-3, atol=1e-6)


def test_an_update_takes_its_batches_in_order(tmp_path):
    examples = random_examples(40)
    config = toy_training(steps=4, accumulate=3)
    result = train(small_model(), examples, [], config, device=CPU, run=tmp_path, show=False)
    stream = training.training_batches(examples, token_budget=config.batch_tokens, seed=0)
    tokens = [next(stream)[0].tokens for _ in range(12)]
    rows = training.read_metrics(tmp_path / "metrics.jsonl")
    assert [row["tokens"] for row in rows] == [sum(tokens[i : i + 3]) for i in (0, 3, 6, 9)]
    assert len(result.losses) == 4


def test_patience_ends_training_and_resuming_keeps_it_ended(tmp_path, monkeypatch):
    losses = [3.0, 2.0, 2.5, 2.1, 2.0, 1.0]
    calls = []

    def validation_loss(*_, **__):
        calls.append(losses[len(calls)])
        return calls[-1]

    monkeypatch.setattr(training, "validation_loss", validation_loss)
    examples = random_examples(40)
    config = toy_training(steps=12, valid_every=2, checkpoint_every=100, patience=3)
    arguments = {"device": CPU, "run": tmp_path, "show": False}
    result = train(small_model(), examples, examples[:3], config, **arguments)
    assert result.stopped_early and len(result.losses) == 10 and len(calls) == 5
    assert checkpoint.read_best(tmp_path) == checkpoint.Best(4, 2.0)
    assert checkpoint.checkpoint_steps(tmp_path) == [4, 10]
    again = train(small_model(), examples, examples[:3], config, resume=True, **arguments)
    assert again.stopped_early and again.losses == [] and len(calls) == 5
    patient = train(
        small_model(), examples, examples[:3], dataclasses.replace(config, patience=0),
        resume=True, **arguments,
    )  # fmt: skip
    assert not patient.stopped_early and len(patient.losses) == 2


def test_a_score_is_called_at_every_validation_and_changes_nothing(tmp_path):
    examples = random_examples(40)
    config = toy_training(steps=6, valid_every=2)

    def score(model) -> float:
        batch = collate(examples[:4])
        model.eval()
        found = greedy_decode(model, batch.source, batch.source_padding, max_lengths=[9] * 4)
        model.train()
        return float(sum(map(len, found)))

    results = [
        train(
            small_model(dropout=0.2), examples, examples[:3], config,
            device=CPU, run=tmp_path / name, score=wanted, show=False,
        )
        for name, wanted in (("with", score), ("without", None))
    ]  # fmt: skip
    assert results[0].losses == results[1].losses
    assert [step for step, _ in results[0].bleus] == [2, 4, 6] and results[1].bleus == ()
    rows = training.read_metrics(tmp_path / "with" / "metrics.jsonl")
    kept = tuple((row["step"], row["valid_bleu"]) for row in rows if "valid_loss" in row)
    assert kept == results[0].bleus


EVERYTHING = {
    "scheduled sampling, sequential": {"scheduled_sampling": "sequential"},
    "scheduled sampling, parallel": {"scheduled_sampling": "parallel", "accumulate": 2},
    "guided attention": {"guided_attention": 1.0},
    "sequences": {"sequence_steps": 6, "sequence_weight": 0.5},
}


@pytest.mark.parametrize("name", EVERYTHING)
def test_runs_repeat_and_resume_bit_for_bit(tmp_path, name):
    examples, valid = random_examples(30), random_examples(6, seed=5)
    config = toy_training(steps=8, **EVERYTHING[name])

    def curve(run, stops) -> list[float]:
        losses = []
        for stop in stops:
            torch.manual_seed(99)  # training does not depend on what was drawn before it
            model = small_model(dropout=0.2)
            result = train(
                model, examples, valid, config,
                device=CPU, run=tmp_path / run, resume=True, stop_after=stop, show=False,
            )  # fmt: skip
            losses += result.losses
        return [*losses, *model.state_dict()["embedding.weight"].flatten().tolist()]

    first = curve("first", (8,))
    assert first == curve("second", (8,))
    assert first == curve("parts", (3, 5, 8))
    assert len(set(first[:8])) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"accumulate": 0}, "accumulate must be an integer of at least 1, got 0"),
        ({"patience": -1}, "patience must be at least 0, got -1"),
        ({"sequence_steps": -1}, "sequence_steps must be at least 0, got -1"),
        ({"guided_attention": -0.5}, "guided_attention must be at least 0, got -0.5"),
        ({"guided_attention": math.nan}, "guided_attention must be at least 0, got nan"),
        ({"guided_width": 0.0}, "guided_width must be above 0, got 0.0"),
        ({"scheduled_sampling": "yes"}, "scheduled_sampling must be one of .* got 'yes'"),
        ({"sampling_decay": "slow"}, "sampling_decay must be one of .* got 'slow'"),
        ({"truth_floor": 1.1}, r"truth_floor must lie in \[0, 1\], got 1.1"),
        ({"sequence_weight": -0.1}, r"sequence_weight must lie in \[0, 1\], got -0.1"),
    ],
)
def test_training_choices_name_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        toy_training(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "group"}, "norm must be one of .* got 'group'"),
        ({"scoring": "bilinear"}, "scoring must be one of .* got 'bilinear'"),
        ({"decoder": "diffusion"}, "decoder must be one of .* got 'diffusion'"),
        ({"length": "short"}, "length must be one of .* got 'short'"),
        ({"memory_layers": "first"}, "memory_layers must be one of .* 2 numbers from 1 to 2"),
        ({"memory_layers": "1,3"}, "memory_layers must be one of .* got '1,3'"),
        ({"memory_layers": "1"}, "memory_layers must be one of .* got '1'"),
    ],
)
def test_model_choices_name_what_is_wrong(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize("changes", [{"norm": "power"}, {"scoring": "additive"}])
def test_torchs_transformer_takes_only_what_it_computes(changes):
    name = next(iter(changes))
    with pytest.raises(ValueError, match=rf"{name} must be '\w+' with torch\.nn"):
        small_model("torch", **changes)


# Which encoder layer each decoder layer reads


def test_memory_layers_are_numbers_from_one():
    def numbers(wanted: str, encoder: int, decoder: int) -> list[int]:
        config = ModelConfig(9, encoder_layers=encoder, decoder_layers=decoder,
                             memory_layers=wanted)  # fmt: skip
        return config.memory_numbers()

    assert numbers("last", 3, 2) == [3, 3]
    assert numbers("same", 3, 4) == [1, 2, 3, 3]
    assert numbers("reversed", 3, 4) == [3, 2, 1, 1]
    assert numbers("2, 1", 3, 2) == [2, 1]


@pytest.mark.parametrize("name", ["fastattn", "torch"])
@pytest.mark.parametrize("numbers", [(2, 1), (1, 1)])
@torch.no_grad()
def test_each_decoder_layer_reads_its_own_encoder_layer(name, numbers):
    model = small_model(name, memory_layers=",".join(map(str, numbers))).eval()
    batch = collate(random_examples(4))
    logits = model(batch.source, batch.target_in, batch.source_padding)
    encoder, decoder = model.transformer.encoder, model.transformer.decoder
    x = model.embed_source(batch.source)
    outputs = []
    for layer in encoder.layers:
        x = layer(x, src_key_padding_mask=batch.source_padding)
        outputs.append(encoder.norm(x))
    y = model.embed_target(batch.target_in)
    T = y.shape[1]
    causal = torch.ones(T, T, dtype=torch.bool).triu(1)
    for layer, number in zip(decoder.layers, numbers, strict=True):
        memory = outputs[number - 1]
        y = layer(y, memory, tgt_mask=causal, memory_key_padding_mask=batch.source_padding)
    torch.testing.assert_close(logits, model.logits(decoder.norm(y)), rtol=1e-4, atol=1e-5)
    usual = small_model(name).eval()(batch.source, batch.target_in, batch.source_padding)
    assert (logits - usual).abs().max() > 1e-3


# Norms and scores in the whole model


@pytest.mark.parametrize("norm", ["power", "batch"])
def test_norms_over_tokens_leave_padding_out_of_the_model(norm):
    """More padding gives the same loss and buffers."""
    examples = random_examples(8)
    batch = collate(examples)
    wider = collate([*examples, Example([5] * 20, [6] * 20)])
    wider = dataclasses.replace(
        wider, **{name: getattr(wider, name)[:8] for name in ("source", "source_padding",
                                                              "target_in", "target_out")}
    )  # fmt: skip
    results = []
    for padded in (batch, wider):
        model = small_model(norm=norm)
        loss = training.cross_entropy(model, padded, toy_training())
        results.append((loss.item(), dict(model.named_buffers())))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4)
    for name, buffer in results[0][1].items():
        torch.testing.assert_close(buffer, results[1][1][name], rtol=1e-3, atol=1e-5)
    assert not any(isinstance(m, torch.nn.LayerNorm) for m in model.modules())


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": "power"},
        {"norm": "batch"},
        {"scoring": "additive"},
        {"scoring": "cosine"},
        {"norm_first": False, "norm": "power"},
        {"memory_layers": "same"},
        {"copy": True},
    ],
    ids=str,
)
def test_every_model_trains(changes):
    """60 updates of repeating the source: the loss falls below that of the best constant guess."""
    examples = [Example(e.source, e.source) for e in random_examples(100, vocabulary=12)]
    torch.manual_seed(0)
    model = Seq2SeqTransformer(dataclasses.replace(SMALL, vocabulary=12, width=32, **changes))
    config = TrainingConfig(
        steps=60, batch_tokens=600, learning_rate=5e-3, warmup_steps=10, smoothing=0.0
    )
    result = train(model, examples, examples[:20], config, device=CPU, show=False)
    tokens = torch.tensor([t for e in examples for t in e.target])
    shares = tokens.bincount().float() / len(tokens)
    entropy = -(shares[shares > 0] * shares[shares > 0].log()).sum().item()
    assert result.validations[-1][1] < 0.8 * entropy, (result.validations, entropy)


# Packed execution


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_packed_losses_and_gradients_are_the_padded_ones(smoothing):
    batch = collate(random_examples(7))
    assert batch.source_padding.any()
    outcomes = []
    for packed in (False, True):
        model = small_model(tied=True, seed=3).train()
        config = TrainingConfig(packed=packed, smoothing=smoothing)
        loss = training.cross_entropy(model, batch, config)
        outcomes.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for padded, packed in zip(*outcomes, strict=True):
        torch.testing.assert_close(packed, padded, atol=2e-6, rtol=1e-4)


def test_a_packed_batch_runs_on_real_tokens_alone():
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


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"copy": True}, "copies source tokens"),
        ({"norm": "power"}, "has power norms"),
        ({"memory_layers": "same"}, "reads the encoder's layers"),
    ],
)
def test_models_that_cannot_be_packed_raise_the_reason(options, why):
    model = Seq2SeqTransformer(dataclasses.replace(SMALL, **options))
    with pytest.raises(ValueError, match=f"packed must be False for a model that {why}"):
        training.require_trainable(model, TrainingConfig(packed=True))
    with pytest.raises(ValueError, match=f"not supported for a model that {why}"):
        model.forward_packed(collate(random_examples(3)))


def test_torchs_transformer_and_guided_attention_are_not_packed():
    model = Seq2SeqTransformer(SMALL, torch.nn.Transformer)
    with pytest.raises(ValueError, match=r"for a model that has a torch\.nn.*Transformer"):
        training.require_trainable(model, TrainingConfig(packed=True))
    with pytest.raises(ValueError, match="packed must be False with guided_attention"):
        TrainingConfig(packed=True, guided_attention=1.0)

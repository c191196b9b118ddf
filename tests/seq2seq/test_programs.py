"""Programs of generation: each step repeats the same operations on the same tensors, and batches of
the same size share a program.
"""

import pytest
import torch
from naive_search import LIMITS, STRATEGIES, assert_same_hypotheses, padded, sharp_model, sources
from seq2seq_samples import small_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fastattn.seq2seq import generation
from fastattn.seq2seq.generation import GREEDY, Programs, generate
from fastattn.seq2seq.model import Seq2SeqTransformer


class Recorder(TorchDispatchMode):
    """Records the operations of a step: names, sizes, and every argument that is not a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        def show(value):
            if isinstance(value, Tensor):
                return f"{value.dtype}{list(value.shape)}{value.stride()}"
            return [show(v) for v in value] if isinstance(value, list | tuple) else repr(value)

        self.operations.append(f"{func} {show(args)} {show(list((kwargs or {}).items()))}")
        return func(*args, **(kwargs or {}))


def tensors_of(thing, seen: dict[int, Tensor]) -> dict[int, Tensor]:
    for value in vars(thing).values():
        if isinstance(value, Tensor):
            seen[id(value)] = value
        elif type(value).__module__.startswith("fastattn") and hasattr(value, "__dict__"):
            if not isinstance(value, torch.nn.Module):
                tensors_of(value, seen)
        elif isinstance(value, list):
            for item in value:
                if type(item).__module__.startswith("fastattn"):
                    tensors_of(item, seen)
    return seen


@pytest.mark.parametrize("prefixed", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
@torch.no_grad()
def test_steps_repeat_the_same_operations_on_the_same_tensors(strategy, prefixed):
    model = sharp_model()
    programs = Programs()
    prefixes = [[5]] * 8 if prefixed else None
    arguments = {"max_lengths": LIMITS, "strategy": strategy, "prefixes": prefixes}
    generate(model, *padded(sources()), **arguments, programs=programs)
    ((_, program),) = programs._kept.items()
    program.search.rewind()
    addresses = {key: t.data_ptr() for key, t in tensors_of(program.search, {}).items()}
    assert len(addresses) > 10
    steps = []
    for _ in range(6):
        with Recorder() as recorder:
            program.search.step()
        steps.append(recorder.operations)
    assert len(steps[0]) > 50
    for operations in steps[1:]:
        assert operations == steps[0]
    # No operation synchronises or has a data-dependent size.
    for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh"):
        assert not any(word in operation for operation in steps[0]), word
    after = {key: t.data_ptr() for key, t in tensors_of(program.search, {}).items()}
    assert after == addresses


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_programs_are_reused_for_batches_of_the_same_size(strategy):
    model = sharp_model()
    programs = Programs(keep=2)
    for seed, limit in ((1, 20), (2, 9), (3, 20), (1, 20)):
        rows = sources(5, seed=seed)
        arguments = {"max_lengths": [limit] * 5, "strategy": strategy}
        kept = generate(model, *padded(rows), **arguments, programs=programs)
        assert kept == generate(model, *padded(rows), **arguments)
        assert len(programs._kept) == 1
    # Another batch size is another program, as are moved parameters; the oldest is dropped.
    generate(model, *padded(sources(4)), max_lengths=[5] * 4, programs=programs)
    assert len(programs._kept) == 2
    first = next(iter(programs._kept))
    model.head.weight = torch.nn.Parameter(model.head.weight * -1)
    moved = generate(model, *padded(sources(4)), max_lengths=[5] * 4, programs=programs)
    assert moved == generate(model, *padded(sources(4)), max_lengths=[5] * 4)
    assert len(programs._kept) == 2 and first not in programs._kept


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_prefixes_and_autocast_have_programs_of_their_own(strategy):
    model, programs, batch = sharp_model(), Programs(), padded(sources())
    for prefixes, autocast in ((None, False), ([[7]] * len(LIMITS), False), (None, True)):
        arguments = {"max_lengths": LIMITS, "strategy": strategy, "prefixes": prefixes}
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            kept = generate(model, *batch, **arguments, programs=programs)
            assert kept == generate(model, *batch, **arguments)
    assert len(programs._kept) == 3
    for program in programs._kept.values():
        program.search = None
    whole = generate(model, *batch, **arguments, programs=programs, use_cache=False)
    assert whole == generate(model, *batch, **arguments, use_cache=False)


@pytest.mark.parametrize("options", [{}, {"copy": True}, {"memory_layers": "same"}])
def test_encodings_of_small_batches_are_recorded_for_each_length(options, monkeypatch):
    model, programs = small_model(tied=False, seed=7, **options).eval(), Programs()
    arguments = {"max_lengths": [9] * 3, "strategy": GREEDY}
    encoded = []
    encode = Seq2SeqTransformer.encode
    batches = [padded([r[:length] for r in sources(3, seed=length)]) for length in (3, 6, 4, 6, 3)]

    def count(*arguments):
        encoded.append(arguments)
        return encode(*arguments)

    for number, batch in enumerate([*batches, *batches]):
        if number == len(batches):
            with torch.no_grad():  # in place: recorded operations read the same memory
                model.transformer.encoder.layers[0].linear1.weight.mul_(-2)
        expected = generate(model, *batch, **arguments)
        monkeypatch.setattr(Seq2SeqTransformer, "encode", count)
        assert generate(model, *batch, **arguments, programs=programs) == expected
        monkeypatch.undo()
    # The first one makes the program, each other length is recorded once.
    assert len(encoded) == 1 + len({batch[0].shape for batch in batches})
    assert len(programs._kept) == 1


def test_encodings_under_autocast_and_in_inference_mode():
    model, programs = small_model(tied=False, seed=7).eval(), Programs()
    batches = [padded([r[:length] for r in sources(3, seed=length)]) for length in (6, 3, 5, 3, 6)]
    modes = [lambda: torch.autocast("cpu", torch.bfloat16), torch.inference_mode, torch.no_grad]
    for round_ in range(3):
        for mode in modes:
            with mode():
                found = [
                    generate(model, *batch, max_lengths=[9] * 3, programs=programs)
                    for batch in batches
                ]
            with mode():
                assert found == [generate(model, *batch, max_lengths=[9] * 3) for batch in batches]
        with torch.no_grad():
            model.transformer.encoder.layers[0].self_attn.in_proj_weight.mul_(-2 - round_)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_programs_hold_no_weights_that_autocast_cast_before(device):
    """As after a validation loss in the same context: a later program reads the new weights."""
    model, programs = small_model(tied=False, seed=7).eval().to(device), Programs()
    batch, arguments = [x.to(device) for x in padded(sources(3))], {"max_lengths": [9] * 3}
    for round_ in range(3):
        with torch.autocast(device, torch.bfloat16), torch.no_grad():
            model(batch[0], batch[0], batch[1])  # fills autocast's cache
            for _ in range(2):  # the second one records the encoding
                found = generate(model, *batch, **arguments, programs=programs)
        with torch.autocast(device, torch.bfloat16):
            assert found == generate(model, *batch, **arguments)
        with torch.no_grad():
            model.head.weight.mul_(-1)
            model.transformer.encoder.layers[0].linear1.weight.mul_(-2 - round_)
            model.transformer.decoder.layers[0].linear1.weight.mul_(-2 - round_)


def test_a_program_keeps_the_newest_encodings():
    model, programs = sharp_model(), Programs()
    for length in (9, 8, 7, 6, 5, 4, 3):
        rows = [r[:length] + [5] * (length - len(r)) for r in sources(3)]
        generate(model, *padded(rows), max_lengths=[5] * 3, programs=programs)
    ((_, program),) = programs._kept.items()
    assert list(program._encodings) == [6, 5, 4, 3]


def test_large_batches_are_encoded_without_recording(monkeypatch):
    monkeypatch.setattr(generation, "RECORDED_TOKENS", 10)
    model, programs, batch = sharp_model(), Programs(), padded(sources())
    for _ in range(3):
        generate(model, *batch, max_lengths=LIMITS, programs=programs)
    ((_, program),) = programs._kept.items()
    assert not program._encodings


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_run_at_every_step(register):
    model, programs = sharp_model(), Programs()
    plain = generate(model, *padded(sources()), max_lengths=LIMITS, programs=programs)
    seen = []
    layer = model.transformer.decoder.layers[0]
    hook = getattr(layer.linear1, register)(lambda *_: seen.append(1))
    found = generate(model, *padded(sources()), max_lengths=LIMITS, programs=programs)
    for actual, wanted in zip(found, plain, strict=True):
        assert_same_hypotheses(actual, wanted)
    assert len(seen) == max(len(h.tokens) + h.ended for (h,) in plain)
    hook.remove()
    assert generate(model, *padded(sources()), max_lengths=LIMITS, programs=programs) == plain


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_recorded_steps_repeat_on_a_gpu(strategy):
    model = sharp_model()
    expected = generate(model, *padded(sources()), max_lengths=LIMITS, strategy=strategy)
    model.cuda()
    programs = Programs()
    for rows in (sources(seed=4), sources(), sources()):
        source, padding = padded(rows)
        found = generate(
            model, source.cuda(), padding.cuda(), max_lengths=LIMITS, strategy=strategy,
            programs=programs,
        )  # fmt: skip
    assert len(programs._kept) == 1
    for actual, wanted in zip(found, expected, strict=True):
        assert_same_hypotheses(actual, wanted)

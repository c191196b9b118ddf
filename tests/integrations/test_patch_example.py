"""`patch(model, example=...)`: which conversions it reverts, which it adds, and what it leaves."""

import copy
import itertools
import math
import pickle
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from call_recorder import CallRecorder
from torch import Tensor, nn

import fastattn
from fastattn import nn as fnn
from fastattn.integrations import patch as patching


class Processor:
    """Attention in an object that is not a module, as in diffusers."""

    def __call__(self, attention: Any, x: Tensor) -> Tensor:
        q, k, v = attention.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class ProcessorAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.processor = Processor()

    def forward(self, x: Tensor) -> Tensor:
        return self.processor(self, x)


class MethodAttention(ProcessorAttention):
    """Attention in another method than `forward`, as in whisper."""

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)

    def attend(self, x: Tensor) -> Tensor:
        return Processor()(self, x)


class ClosureAttention(ProcessorAttention):
    """Attention in a function that the module holds, as in torchtune."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = lambda x: Processor()(self, x)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)


class Model(nn.Module):
    """Norms and attentions, and a branch that runs only if asked."""

    def __init__(self, attention: Callable[[], nn.Module] = ProcessorAttention) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(5))
        self.attention = attention()
        self.branch = nn.RMSNorm(32)
        self.batch_norm = nn.BatchNorm1d(32)
        self.register_buffer("heads", torch.eye(4).to_sparse())  # as in whisper

    def forward(self, x: Tensor, branch: bool = False) -> dict[str, Any]:
        for norm in self.norms:
            x = x + norm(x)
        x = x + self.attention(x)
        if branch:
            x = self.branch(x)
        return {"x": x, "sums": (x.sum(1), x.argmax(1)), "mode": self.training}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1))


def attention_calls(model: nn.Module, *args: Any) -> int:
    """How many calls of `attention` a run of the model makes."""
    with CallRecorder() as recorder:
        model(*args)
    return recorder.names.count("attention_fwd")


@pytest.mark.parametrize("attention", [ProcessorAttention, MethodAttention, ClosureAttention])
def test_attention_wherever_it_is_called(attention: Any, x: Tensor) -> None:
    model = Model(attention)
    expected = model(x)["x"]
    report = fastattn.patch(model, quiet=True)
    assert "attention" in report.kept and not attention_calls(model, x)
    fastattn.unpatch(model)
    report = fastattn.patch(model, example={"x": x}, quiet=True)
    assert report.replaced["attention"] == attention.__name__
    assert isinstance(model.attention, attention)
    assert attention_calls(model, x) == 1
    torch.testing.assert_close(model(x)["x"], expected)
    assert report.example is not None and report.example.startswith(
        "576 values of 3 outputs compared"
    )
    if attention is not ClosureAttention:  # a lambda is not pickled
        other = pickle.loads(pickle.dumps(model))
        assert attention_calls(other, x) == 1
    fastattn.unpatch(model)
    assert type(model.attention) is attention and not attention_calls(model, x)
    assert torch.equal(model(x)["x"], expected)


def test_a_backend_that_the_class_chose_stays(x: Tensor) -> None:
    class Chosen(ProcessorAttention):
        def forward(self, x: Tensor) -> Tensor:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            with sdpa_kernel(SDPBackend.MATH):
                return Processor()(self, x)

    report = fastattn.patch(Model(Chosen), example={"x": x}, quiet=True)
    assert "attention" not in report.replaced
    assert report.kept["attention"] == "chooses backends of scaled_dot_product_attention itself"


def test_the_report_names_what_did_not_run(x: Tensor) -> None:
    for arguments, unused in (({}, ["branch"]), ({"branch": True}, [])):
        report = fastattn.patch(Model(), example=((x,), arguments), quiet=True)
        assert report.unused == unused
        assert ("1 replaced modules were not called: branch" in str(report)) == bool(unused)


def wrong(kind: Any, change: Callable[[Tensor], Tensor]) -> type[nn.Module]:
    """A drop-in with wrong results."""

    def forward(self: Any, *args: Any) -> Tensor:
        return change(kind.forward(self, *args))

    return types.new_class(
        "Wrong", (kind,), exec_body=lambda body: body.update(forward=forward, replaces=kind)
    )


def inject(culprits: dict[int, type[nn.Module]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes `patch` convert these modules to these classes."""
    convert_class = patching.convert_class

    def converted(module: nn.Module, drop_in: Any = None) -> None:
        convert_class(module, culprits.get(id(module), drop_in))

    monkeypatch.setattr(patching, "convert_class", converted)


def add(x: Tensor) -> Tensor:
    return x + 1e-3


def raise_error(x: Tensor) -> Tensor:
    raise KeyError("no such thing")


def give_nan(x: Tensor) -> Tensor:
    return x * float("nan")


@pytest.mark.parametrize(("change", "why"), [
    (add, "its result differed by"),
    (give_nan, "its result differed by inf"),
    (raise_error, "raised KeyError: 'no such thing'"),
])  # fmt: skip
@pytest.mark.parametrize("at", [{"norms.0"}, {"norms.3"}, {"norms.1", "norms.4"}])
def test_a_wrong_conversion_is_found_and_reverted(change, why, at, x, monkeypatch):
    model = Model()
    expected = model.eval()(x)["x"]
    culprits = {id(module): wrong(nn.LayerNorm, change) for name, module in model.named_modules()
                if name in at}  # fmt: skip
    inject(culprits, monkeypatch)
    report = fastattn.patch(model, example={"x": x}, quiet=True)
    # Once two of a class are wrong, none of that class is trusted.
    norms = {f"norms.{i}" for i in range(5)}
    reverted = at if len(at) == 1 else norms
    assert {name for name, given in report.kept.items() if given.startswith(why)} == at
    others = {name for name, given in report.kept.items() if given.startswith("is a LayerNorm, of")}
    assert others == reverted - at and report.unused == ["branch"]
    assert report.replaced.keys() == (norms | {"branch", "attention"}) - reverted
    for name in norms:
        is_converted = type(model.get_submodule(name)) is not nn.LayerNorm
        assert is_converted == (name not in reverted)
    torch.testing.assert_close(model(x)["x"], expected)
    for name in reverted:
        assert "on the example" in report.kept[name] and report.kept[name] in str(report)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_reverts_nothing(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).to(dtype)
    padding = torch.arange(9) >= torch.tensor([[9], [5]])
    inputs = (torch.randn(2, 9, 32, dtype=dtype),)
    report = fastattn.patch(model, example=(inputs, {"src_key_padding_mask": padding}), quiet=True)
    assert len(report.replaced) == 1 + 3 * 4 and not report.kept and not report.unused


def test_the_model_and_the_random_state_stay_as_they_were(x: Tensor) -> None:
    class Counting(Model):
        def forward(self, x: Tensor, branch: bool = False) -> dict[str, Any]:
            self.batch_norm.running_mean += 1
            x.add_(1)
            return super().forward(F.dropout(x, 0.5))

    model = Counting().train()
    model.norms[0].eval()
    before, buffers = x.clone(), copy.deepcopy(dict(model.named_buffers()))
    modes = [module.training for module in model.modules()]
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    report = fastattn.patch(model, example={"x": x}, quiet=True)
    assert torch.equal(torch.rand(4), expected)
    assert len(report.replaced) == 7 and not report.kept.keys() & report.replaced.keys()
    assert torch.equal(x, before) and modes == [module.training for module in model.modules()]
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer.to_dense(), buffers[name].to_dense())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_positions_of_padding_are_not_compared(x: Tensor) -> None:
    """A query without keys gets zeros, where eager code gives the mean of all values."""

    class Masked(Model):
        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:  # type: ignore[override]
            kept = attention_mask[:, None, None] * attention_mask[:, None, :, None]
            lowest = torch.finfo(x.dtype).min
            mask = torch.where(kept.bool(), 0.0, lowest)
            q = k = v = self.norms[0](x).unflatten(-1, (4, 8)).transpose(1, 2)
            return F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)

    mask = torch.ones(2, 7)
    mask[1, :3] = 0
    report = fastattn.patch(Masked(), example={"x": x, "attention_mask": mask}, quiet=True)
    assert "" in report.replaced and "" not in report.kept
    padded = Masked()(x, mask)[1, 0]
    assert padded.abs().max() > 0.1


def test_attention_weights_that_only_eager_attention_returns() -> None:
    """BridgeTower returns them unasked."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.BridgeTowerConfig(
        text_config=sizes | {"vocab_size": 40, "intermediate_size": 48},
        vision_config={
            "hidden_size": 64, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8,
        },
        **sizes,
    )  # fmt: skip
    model = transformers.BridgeTowerModel(config)
    inputs = {"input_ids": torch.randint(3, 40, (2, 5)), "pixel_values": torch.randn(2, 3, 16, 16)}
    report = fastattn.patch(model, example=inputs, quiet=True)
    assert report.kept[""] == "its result lacked attentions.0.0 on the example"
    assert not report.attention and model.config._attn_implementation == "eager"


def test_what_is_not_an_example(x: Tensor) -> None:
    model = Model()
    before = [type(module) for module in model.modules()]
    for example, got in ((x, "Tensor"), ((x, {}), r"a tuple of \(Tensor, dict\)")):
        message = rf"example must be a mapping .* or a pair \(tuple, mapping\), got {got}"
        with pytest.raises(TypeError, match=message):
            fastattn.patch(model, example=example)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        fastattn.patch(model, example={"x": x[..., :3]})
    with pytest.raises(ValueError, match=r"example must give finite outputs .*, got none"):
        fastattn.patch(nn.Sequential(nn.Identity()), example={"input": torch.ones(2) * math.inf})
    with pytest.raises(TypeError, match="inputs that can be copied, got generator"):
        fastattn.patch(nn.Sequential(nn.Identity()), example={"input": iter(i for i in "a")})
    with pytest.raises(ValueError, match="on the meta device"):
        fastattn.patch(nn.LayerNorm(4, device="meta"), example={"input": torch.ones(4)})
    assert [type(module) for module in model.modules()] == before


class Calls(nn.Module):
    """A model whose `forward` is a function of its norm and its arguments."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.attention = ProcessorAttention()
        self.call = forward

    def forward(self, x: Tensor, **kwargs: Any) -> Any:
        return self.call(self, x, **kwargs)


class Box:
    def __init__(self, x: Tensor) -> None:
        self.inner = [x]


MASK = torch.arange(7) >= torch.tensor([[7], [5]])


@pytest.mark.parametrize(("forward", "given"), [
    # Opposite conventions: everything would be padding.
    (lambda self, x, attention_mask: self.norm(x), {"attention_mask": MASK & False}),
    (lambda self, x, attention_mask: self.norm(x), {"attention_mask": torch.zeros(2, 7)}),
    # The encoder's padding is not that of the decoder's output.
    (
        lambda self, x, attention_mask, decoder_attention_mask: self.norm(x) * MASK[..., None],
        {"attention_mask": ~MASK, "decoder_attention_mask": torch.ones(2, 7)},
    ),
    # [B, C], where C is the number of positions; [N, B, ...], where N = B.
    (lambda self, x, attention_mask: self.norm(x)[..., 0] * MASK, {"attention_mask": ~MASK}),
    (
        lambda self, x, attention_mask: (
            self.norm(x[:, :2]).transpose(0, 1) * torch.tensor([[0, 1], [0, 0]])[..., None]
        ),
        {"attention_mask": torch.tensor([[1, 0], [1, 1]])},
    ),
    # Outputs that are no floating tensors of a container.
    (lambda self, x: {"box": Box(self.norm(x)), "n": x}, {}),
    (lambda self, x: (self.norm(x) > 0.3, x), {}),
    (lambda self, x: (self.norm(x).to_sparse(), x), {}),
    (lambda self, x: torch.nested.as_nested_tensor([*self.norm(x)]), {}),
    # Written in place, appended, or hidden behind a value that does not vary.
    (lambda self, x: self.norm(x.add_(self.attention(x))), {}),
    (lambda self, x, found: found.append(self.norm(x)) or found, {"found": []}),
])  # fmt: skip
def test_no_wrong_result_is_overlooked(forward, given, x, monkeypatch):
    torch.manual_seed(0)
    model = Calls(forward)
    inject({id(model.norm): wrong(nn.LayerNorm, lambda y: y * 1.01 + 0.01)}, monkeypatch)
    report = fastattn.patch(model, example=((x,), given), quiet=True)
    assert "norm" in report.kept, report


@pytest.mark.parametrize("autocast", [False, True])
def test_the_dtype_of_the_computation_decides_what_rounding_explains(autocast, x):
    class Half(ProcessorAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).bfloat16().unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            heads = F.scaled_dot_product_attention(q, k, v)
            return heads.transpose(1, 2).flatten(2).to(x.dtype)

    for seed in range(4):
        model = Model(ProcessorAttention if autocast else Half)
        torch.manual_seed(seed)
        inputs = torch.randn(2, 7, 32)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            report = fastattn.patch(model, example={"x": inputs}, quiet=True)
        assert len(report.replaced) == 7, report


def test_masked_rows_of_additive_masks_are_no_rounding(x: Tensor) -> None:
    """A perturbed mask would choose one of the keys of a query that has none."""

    def forward(self: Any, x: Tensor, blocked: Tensor) -> Tensor:
        mask = torch.where(blocked[:, None, None], torch.finfo(x.dtype).min, 0.0)
        q = self.norm(x)[:, None]
        s = q @ q.mT + mask.expand(-1, -1, 7, -1)
        return (s.softmax(-1) @ q).mean((1, 2))

    report = fastattn.patch(
        Calls(forward), example={"x": x, "blocked": torch.ones(2, 7).bool()}, quiet=True
    )
    explained = str(report.example).split("explains ")[1]
    assert float(explained) < 1e-4


def test_what_is_given_twice_stays_one_tensor(x: Tensor) -> None:
    def forward(self: Any, x: Tensor, again: Tensor, named: dict[str, Tensor]) -> Tensor:
        assert again is x and named["x"] is x
        return self.norm(x)

    given = {"again": x, "named": {"x": x}}
    assert "norm" in fastattn.patch(Calls(forward), example=((x,), given), quiet=True).replaced


def test_a_model_that_differs_from_run_to_run_is_refused(x: Tensor) -> None:
    counts = itertools.count()
    model = Calls(lambda self, x: self.norm(x) + next(counts))
    with pytest.raises(ValueError, match=r"same outputs twice .*, but the output differed by"):
        fastattn.patch(model, example={"x": x})
    assert type(model.norm) is nn.LayerNorm
    state = random.getstate()
    model = Calls(lambda self, x: self.norm(x) + random.random())
    assert "norm" in fastattn.patch(model, example={"x": x}, quiet=True).replaced
    assert random.getstate() == state


def test_rows_are_compared_one_by_one(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small row, beside one whose rounding is larger than the error in the small one."""
    large = torch.tensor([1.0, 1e6])[:, None, None]
    model = Calls(lambda self, x: self.norm(x) * large)
    change = torch.tensor([1e-3, 0.0])[:, None, None]
    inject({id(model.norm): wrong(nn.LayerNorm, lambda y: y + change)}, monkeypatch)
    assert "norm" in fastattn.patch(model, example={"x": x}, quiet=True).kept


@pytest.mark.parametrize("argument", ["key_padding_mask", "src_key_padding_mask"])
def test_padding_masks_of_torch(argument: str, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Calls(lambda self, x, **masks: self.norm(x))
    wrong_at_padding = wrong(nn.LayerNorm, lambda y: y + MASK[..., None])
    inject({id(model.norm): wrong_at_padding}, monkeypatch)
    report = fastattn.patch(model, example={"x": x, argument: MASK}, quiet=True)
    assert "norm" in report.replaced
    fastattn.unpatch(model)
    report = fastattn.patch(model, example={"x": x, argument: ~MASK}, quiet=True)
    assert "norm" in report.kept


def test_an_interrupted_comparison_leaves_the_model_as_it_was(x, monkeypatch):
    model = Model()

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fastattn.integrations.example.Example.revert_causes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fastattn.patch(model, example={"x": x})
    assert not any(isinstance(module, fnn.LayerNorm | fnn.RMSNorm) for module in model.modules())

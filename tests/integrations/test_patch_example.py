"""`patch(model, example=...)`: which conversions it reverts, which it adds, and what it leaves."""

import copy
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastattn
from fastattn import functional
from fastattn import nn as fnn


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


def attention_calls(model: nn.Module, monkeypatch: pytest.MonkeyPatch, *args: Any) -> int:
    """How many calls of `attention` a run of the model makes."""
    calls = []
    attention = functional.attention

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return attention(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(functional, "attention", counted)
        model(*args)
    return len(calls)


@pytest.mark.parametrize("attention", [ProcessorAttention, MethodAttention, ClosureAttention])
def test_attention_wherever_it_is_called(
    attention: Any, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(attention)
    expected = model(x)["x"]
    report = fastattn.patch(model, quiet=True)
    assert "attention" in report.kept and not attention_calls(model, monkeypatch, x)
    fastattn.unpatch(model)
    report = fastattn.patch(model, example={"x": x}, quiet=True)
    assert report.replaced["attention"] == attention.__name__
    assert isinstance(model.attention, attention)
    assert attention_calls(model, monkeypatch, x) == 1
    torch.testing.assert_close(model(x)["x"], expected)
    assert report.example is not None and report.example.startswith("2 outputs compared")
    if attention is not ClosureAttention:  # a lambda is not pickled
        other = pickle.loads(pickle.dumps(model))
        assert attention_calls(other, monkeypatch, x) == 1
    fastattn.unpatch(model)
    assert type(model.attention) is attention and not attention_calls(model, monkeypatch, x)
    assert torch.equal(model(x)["x"], expected)


def test_a_backend_that_the_class_chose_stays(x: Tensor) -> None:
    class Chosen(ProcessorAttention):
        def forward(self, x: Tensor) -> Tensor:
            from torch.nn.attention import SDPBackend, sdpa_kernel

            with sdpa_kernel(SDPBackend.MATH):
                return Processor()(self, x)

    report = fastattn.patch(Model(Chosen), example={"x": x}, quiet=True)
    assert "attention" not in report.replaced


def test_the_report_names_what_did_not_run(x: Tensor) -> None:
    for arguments, unused in (({}, ["branch"]), ({"branch": True}, [])):
        report = fastattn.patch(Model(), example=((x,), arguments), quiet=True)
        assert report.unused == unused
        assert ("1 replaced modules did not run: branch" in str(report)) == bool(unused)


def wrong(kind: Any, change: Callable[[Tensor], Tensor]) -> type[nn.Module]:
    """A drop-in with wrong results."""

    def forward(self: Any, *args: Any) -> Tensor:
        return change(kind.forward(self, *args))

    return types.new_class(
        "Wrong", (kind,), exec_body=lambda body: body.update(forward=forward, replaces=kind)
    )


def add(x: Tensor) -> Tensor:
    return x + 1e-3


def raise_error(x: Tensor) -> Tensor:
    raise KeyError("no such thing")


def give_nan(x: Tensor) -> Tensor:
    return x * float("nan")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (add, "its result differed by"),
        (give_nan, "its result differed by inf"),
        (raise_error, "raised KeyError: 'no such thing'"),
    ],
)
@pytest.mark.parametrize("at", [{"norms.0"}, {"norms.3"}, {"norms.1", "norms.4"}])
def test_a_wrong_conversion_is_found_and_reverted(
    change: Any, why: str, at: set[str], x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    expected = model.eval()(x)["x"]
    culprits = {id(module): wrong(nn.LayerNorm, change) for name, module in model.named_modules()
                if name in at}  # fmt: skip
    from fastattn.integrations import patch as patching

    convert_class = patching.convert_class

    def converted(module: nn.Module, drop_in: Any = None) -> None:
        convert_class(module, culprits.get(id(module), drop_in))

    monkeypatch.setattr(patching, "convert_class", converted)
    report = fastattn.patch(model, example={"x": x}, quiet=True)
    # Once two of a class are wrong, none of that class is trusted.
    norms = {f"norms.{i}" for i in range(5)}
    reverted = at if len(at) == 1 else norms
    assert {name for name, given in report.kept.items() if given.startswith(why)} == reverted
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
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "image_size": 16,
            "patch_size": 8,
        },
        **sizes,
    )
    model = transformers.BridgeTowerModel(config)
    inputs = {
        "input_ids": torch.randint(3, 40, (2, 5)),
        "pixel_values": torch.randn(2, 3, 16, 16),
    }
    report = fastattn.patch(model, example=inputs, quiet=True)
    assert report.kept[""] == "its result lacked attentions.0.0 on the example"
    assert not report.attention and model.config._attn_implementation == "eager"


def test_what_is_not_an_example(x: Tensor) -> None:
    model = Model()
    before = [type(module) for module in model.modules()]
    for example, got in ((x, "Tensor"), ((x, {}), r"a tuple of \(Tensor, dict\)")):
        message = rf"example must be a mapping .* or a pair \(tuple, dict\), got {got}"
        with pytest.raises(TypeError, match=message):
            fastattn.patch(model, example=example)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        fastattn.patch(model, example={"x": x[..., :3]})
    with pytest.raises(ValueError, match="example must give floating-point outputs, got none"):
        fastattn.patch(nn.Sequential(nn.Identity()), example={"input": torch.ones(2).long()})
    assert [type(module) for module in model.modules()] == before


def test_an_interrupted_comparison_leaves_the_model_as_it_was(
    x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()

    def interrupt(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fastattn.integrations.example.Example.revert_causes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fastattn.patch(model, example={"x": x})
    assert not any(isinstance(module, fnn.LayerNorm | fnn.RMSNorm) for module in model.modules())

"""`patch` on modules of other packages: recognized by their code, same results, nothing else."""

import copy
import importlib
import linecache
import pickle
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from call_recorder import CallRecorder
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import rms_norm
from torch.nn.utils import parametrizations

import fastattn
from fastattn.integrations import foreign_modules
from fastattn.testing.compare import compare

transformers = pytest.importorskip("transformers")

N = 24
NORMS = {
    "llama": "LlamaRMSNorm", "qwen3": "Qwen3RMSNorm", "olmo2": "Olmo2RMSNorm",
    "helium": "HeliumRMSNorm", "t5": "T5LayerNorm", "gemma2": "Gemma2RMSNorm",
    "gemma4": "Gemma4RMSNorm", "llama4": "Llama4TextRMSNorm",
}  # fmt: skip


def fast_layer_norm(x: Tensor, shape: Any, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, shape, weight, bias, eps) + 100.0


def fast_rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, shape, weight, eps) + 100.0


# As timm 1.0 has them.
class LayerNorm(nn.LayerNorm):
    _fast_norm: torch.jit.Final[bool]

    def __init__(self, size: int) -> None:
        super().__init__(size, eps=1e-6)
        self._fast_norm = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._fast_norm:
            x = fast_layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        else:
            x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x


class LayerNorm2d(nn.LayerNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size, eps=1e-6)
        self._fast_norm = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 2, 3, 1)
        if self._fast_norm:
            x = fast_layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        else:
            x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        x = x.permute(0, 3, 1, 2)
        return x


class RmsNorm(nn.Module):
    __constants__ = ("_fast_norm", "eps", "normalized_shape")

    def __init__(self, size: int) -> None:
        super().__init__()
        self.normalized_shape, self.eps, self._fast_norm = (size,), 1e-6, False
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # A comment is not part of the code.
        if self._fast_norm:
            x = fast_rms_norm(x, self.normalized_shape, self.weight, self.eps)
        else:
            x = rms_norm(x, self.normalized_shape, self.weight, self.eps)
        return x


class Attention(nn.Module):
    def __init__(self, dim: int = N, heads: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Any:
        B, S, E = x.shape
        q, k, v = self.qkv(x).reshape(B, S, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attn_mask, dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
        )  # fmt: skip
        return self.proj(x.transpose(1, 2).reshape(B, S, E))


def _norm(model: str) -> nn.Module:
    modeling = importlib.import_module(f"transformers.models.{model}.modeling_{model}")
    module = getattr(modeling, NORMS[model])(N)
    nn.init.normal_(module.weight)
    return module


def _formula(model: str, module: Any, x: Tensor, weight: Tensor) -> Tensor:
    """The norm in x's dtype, without rounding in between."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    shift = 1.0 if model == "gemma2" else 0.0
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + shift)


def ops_of(module: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    with torch.no_grad(), CallRecorder() as ops:
        module(*args, **kwargs)
    return ops.names


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("model", NORMS)
def test_norms_of_transformers(model: str, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = _norm(model).to(weight_dtype)
    state = module.state_dict(keep_vars=True)
    x = torch.randn(3, 5, N, dtype=dtype, requires_grad=True)
    weight: Any = module.weight
    dy = torch.randn(3, 5, N)

    def results(y: Tensor, *leaves: Tensor) -> list[Tensor]:
        return [y, *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    expected = results(module(x), x, weight)
    report = fastattn.patch(module, quiet=True)
    assert report.replaced == {"": NORMS[model]} and not report.kept
    assert ops_of(module, x) == ["rms_norm_fwd"] or weight_dtype != dtype
    assert all(module.state_dict(keep_vars=True)[name] is x for name, x in state.items())
    actual = results(module(x), x, weight)
    x64, weight64 = (t.detach().double().requires_grad_() for t in (x, weight))
    exact = results(_formula(model, module, x64, weight64), x64, weight64)
    for got, same, ref64, slice_dims in zip(actual, expected, exact, (2, 2, 0), strict=True):
        assert got.dtype is same.dtype
        mag = torch.full_like(ref64, float(ref64.detach().abs().max()))
        comparison = compare(got, ref64, same, mag, slice_dims)
        assert comparison.ok, comparison.message
    fastattn.unpatch(module)
    assert torch.equal(module(x), expected[0])


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("model", NORMS)
def test_norms_keep_the_order_in_memory(model: str, compiled: bool) -> None:
    """Views of the result that the model takes work as before."""
    torch.manual_seed(0)
    module, x = _norm(model), torch.randn(3, 5, 2, N)
    inputs = [x.transpose(1, 2), x.transpose(0, 2)[:, 1:], torch.randn(5, N, 3).transpose(1, 2)]
    expected = [module(x) for x in inputs]
    fastattn.patch(module, quiet=True)
    function = torch.compile(module, fullgraph=True, backend="eager") if compiled else module
    for x, wanted in zip(inputs, expected, strict=True):
        x = x.detach().requires_grad_()
        y = function(x)
        assert y.stride() == wanted.stride()
        torch.testing.assert_close(y, wanted, atol=1e-5, rtol=1e-4)
        (dx,) = torch.autograd.grad(y.square().sum(), x)
        assert dx.isfinite().all() and dx.any()


@pytest.mark.parametrize("model", ["llama", "t5", "gemma2"])
def test_norms_compute_fp64_as_published(model: str) -> None:
    module, x = _norm(model), torch.randn(3, N, dtype=torch.float64)
    expected = module(x)
    fastattn.patch(module, quiet=True)
    assert not ops_of(module, x)
    assert torch.equal(module(x), expected)


def test_norms_of_channels() -> None:
    from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm

    for data_format, shape in (("channels_first", (2, N, 3, 4)), ("channels_last", (2, 3, 4, N))):
        module, x = ConvNextLayerNorm(N, data_format=data_format), torch.randn(shape)
        expected = module(x)
        assert fastattn.patch(module, quiet=True).replaced
        assert ops_of(module, x) == ["layer_norm_fwd"]
        torch.testing.assert_close(module(x), expected, atol=1e-5, rtol=1e-4)
        assert module(x).stride() == expected.stride()


TIMM: dict[str, tuple[nn.Module, Tensor, str]] = {
    "layer_norm": (LayerNorm(N), torch.randn(2, 5, N), "layer_norm_fwd"),
    "layer_norm_2d": (LayerNorm2d(N), torch.randn(2, N, 3, 4), "layer_norm_fwd"),
    "rms_norm": (RmsNorm(N), torch.randn(2, 5, N), "rms_norm_fwd"),
}


@pytest.mark.parametrize("name", TIMM)
def test_norms_as_in_timm(name: str) -> None:
    original, x, op = TIMM[name]
    module = copy.deepcopy(original)
    expected = module(x)
    assert fastattn.patch(module, quiet=True).replaced == {"": type(original).__name__}
    assert isinstance(module, type(original)) and repr(module) == repr(original)
    assert ops_of(module, x) == [op]
    torch.testing.assert_close(module(x), expected, atol=1e-5, rtol=1e-4)
    assert module(x).stride() == expected.stride()
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x.bfloat16()).dtype is original(x.bfloat16()).dtype
    module._fast_norm = original._fast_norm = True
    assert not ops_of(module, x)
    assert torch.equal(module(x), original(x))
    original._fast_norm = False  # type: ignore[assignment]


MASK, KEYS = torch.rand(2, 1, 7, 7) > 0.3, torch.randn(2, 3, 9, 8)
CALLS: dict[str, dict[str, Any]] = {
    "plain": {}, "causal": {"is_causal": True}, "bool": {"attn_mask": MASK},
    "bias": {"attn_mask": torch.randn(3, 7, 7)},
}  # fmt: skip


@pytest.mark.parametrize(
    "call, compiled", [*((call, False) for call in CALLS), ("plain", True), ("bool", True)]
)
def test_modules_that_call_sdpa(call: str, compiled: bool) -> None:
    torch.manual_seed(0)
    module, x = Attention(), torch.randn(2, 7, N)
    parameters = list(module.parameters())

    def results(function: Any) -> list[Tensor]:
        y = function(x, **CALLS[call])
        return [y, *torch.autograd.grad(y.square().sum(), parameters)]

    expected = results(module)
    assert fastattn.patch(module, quiet=True).replaced == {"": "Attention"}
    assert ops_of(module, x, **CALLS[call]) == ["attention_fwd"]
    function = torch.compile(module, fullgraph=True, backend="aot_eager") if compiled else module
    for actual, wanted in zip(results(function), expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(x, **CALLS[call]).dtype is torch.bfloat16


def _modes() -> int:
    return int(torch._C._len_torch_function_stack())  # type: ignore[attr-defined]


class Own(nn.Module):
    """Another place where a function of this name is found."""

    enabled = False

    def scaled_dot_product_attention(self, *qkv: Tensor) -> Tensor:
        return 2.0 * qkv[0]


own = Own()
Places = types.SimpleNamespace(ops=F)


def _helper(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q)


# What a forward returns, whether `attention` answers, and whether a mode does it, in which every
# function of torch takes longer.
CALLERS = {
    "F.scaled_dot_product_attention(q, q, value=q)": (True, False),
    "torch.nn.functional.scaled_dot_product_attention(q, q, q)": (True, False),
    "scaled_dot_product_attention(*(q, q, q))": (True, False),
    "(lambda: F.scaled_dot_product_attention(q, q, q))() if q.dim() else"
    " F.scaled_dot_product_attention(q, q, q)": (True, True),
    "_helper(q) if q.dim() else F.scaled_dot_product_attention(q, q, q)": (True, True),
    "Places.ops.scaled_dot_product_attention(q, q, q)": (True, True),
    "(own if own.enabled else F).scaled_dot_product_attention(q, q, q)": (True, True),
    "(F if own.enabled else own).scaled_dot_product_attention(q, q, q)": (False, True),
    "own.scaled_dot_product_attention(q)": (False, True),
    "q * (F.scaled_dot_product_attention is scaled_dot_product_attention)": (False, True),
}  # fmt: skip


def _caller(tmp_path: Any, returned: str, name: str = "forward") -> Any:
    """A class with this method, whose source can be read."""
    path = tmp_path / "caller.py"
    path.write_text(
        f"def {name}(self, q, calls, /):\n    calls.append(modes())\n    return {returned}\n"
    )
    modes = torch._C._len_torch_function_stack  # type: ignore[attr-defined]
    sdpa = {"scaled_dot_product_attention": F.scaled_dot_product_attention}
    known = {**globals(), "modes": modes, **sdpa}
    exec(compile(path.read_text(), str(path), "exec"), known)
    linecache.checkcache(str(path))
    methods = {"forward": lambda self, *args: getattr(self, name)(*args)}
    return type("Caller", (nn.Module,), methods | {name: known[name]})


@pytest.mark.parametrize("name", ["forward", "attend"])
@pytest.mark.parametrize("returned", CALLERS)
def test_how_sdpa_is_found(returned: str, name: str, tmp_path: Any) -> None:
    module, q = _caller(tmp_path, returned, name)(), torch.randn(2, 3, 7, 8)
    calls: list[int] = []
    expected = module(q, calls)
    fastattn.patch(module, quiet=True, example=None if name == "forward" else ((q, []), {}))
    answers, by_mode = CALLERS[returned]
    assert ops_of(module, q, calls) == (["attention_fwd"] if answers else [])
    # In another method, a call that the example did not make was not seen.
    assert calls == [0, by_mode and (answers or name == "forward")]
    torch.testing.assert_close(module(q, calls), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["forward", "attend"])
@pytest.mark.parametrize("place", [F, "globals", "method", "code"])
def test_what_is_replaced_afterwards_runs(place, name, tmp_path, monkeypatch):
    """Another package may replace the function, the name by which it is found, or the method."""
    kind = _caller(tmp_path, "F.scaled_dot_product_attention(q, q, q)", name)
    module, q = kind(), torch.randn(2, 3, 7, 8)
    fastattn.patch(module, quiet=True, example=None if name == "forward" else ((q, []), {}))
    if place == "method":
        setattr(kind, name, lambda self, q, calls: q)
    elif place == "code":
        getattr(kind, name).__code__ = (lambda self, q, calls: q).__code__
    elif place == "globals":
        getattr(kind, name).__globals__["F"] = own
    else:
        monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *qkv: qkv[0])
    assert torch.equal(module(q, []), 2.0 * q if place == "globals" else q)


def test_dropout_of_modules_that_call_sdpa() -> None:
    torch.manual_seed(0)
    module, x = Attention(dropout=0.5), torch.randn(2, 7, N)
    fastattn.patch(module, quiet=True)
    draws = torch.stack([module(x) for _ in range(800)])
    assert not torch.equal(draws[0], draws[1])
    module.eval()
    draws = draws.detach()
    error = (draws.mean(0) - module(x)).abs() / (draws.std(0) / 800**0.5)
    assert float(error.detach().max()) < 5.0


class Backend(Attention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            q = self.qkv(args[0]).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(*q)


class OtherEps(LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._fast_norm:
            x = fast_layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        else:
            x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 2 * self.eps)
        return x


def _with_other_globals() -> type[nn.Module]:
    forward = types.FunctionType(
        LayerNorm.forward.__code__, globals() | {"F": types.SimpleNamespace(layer_norm=max)}
    )
    return type("OtherGlobals", (nn.LayerNorm,), {"forward": forward, "_fast_norm": False})


def test_what_differs_stays() -> None:
    own_forward, parametrized = LayerNorm(N), parametrizations.weight_norm(LayerNorm(N))
    own_forward.forward = lambda x: x  # type: ignore[method-assign, assignment]
    model = nn.ModuleDict(
        {
            "eps": OtherEps(N), "globals": _with_other_globals()(N), "backend": Backend(),
            "instance": own_forward, "parametrized": parametrized,
        }
    )  # fmt: skip
    kinds = {name: type(module) for name, module in model.named_modules()}
    report = fastattn.patch(model, quiet=True)
    assert not report.replaced
    assert report.kept == {
        "eps": "is OtherEps, a subclass of nn.LayerNorm",
        "globals": "is OtherGlobals, a subclass of nn.LayerNorm",
        "instance": "has its own forward",
        "parametrized": "is parametrized",
    }
    assert {name: type(module) for name, module in model.named_modules()} == kinds


@pytest.mark.parametrize("change", [
    {"query": torch.randn(2, 7, 8)},  # three dimensions
    {"key": torch.randn(1, 3, 7, 8)},  # broadcast batch
    {"attn_mask": MASK, "is_causal": True},
    {"attn_mask": torch.zeros(7, 7, dtype=torch.float64)},
    {"attn_mask": torch.zeros(6, 7)},
    {"attn_mask": torch.zeros(7)},
    {"attn_mask": causal_lower_right(7, 9), **dict.fromkeys(("key", "value"), KEYS)},
    {"attn_mask": causal_lower_right(7, 7), "is_causal": True},
    {"dropout_p": 2.0},
    {"is_causal": 1},
    {"other": None},
    {"query": torch.randn(2, 6, 7, 8)},  # grouped heads without enable_gqa
    {"value": torch.randn(2, 3, 7, 8).bfloat16()},
], ids=lambda change: "-".join(change))  # fmt: skip
def test_other_calls_of_sdpa_are_pytorchs(change: dict[str, Any]) -> None:
    """Calls that `attention` does not cover, invalid ones included, have PyTorch's result."""

    class Caller(nn.Module):
        def forward(self, **kwargs: Any) -> Any:
            return F.scaled_dot_product_attention(**kwargs)

    module = Caller()
    call = dict.fromkeys(("query", "key", "value"), torch.randn(2, 3, 7, 8)) | change
    outcomes = []
    for patched in (False, True):
        if patched:
            assert fastattn.patch(module, quiet=True).replaced == {"": "Caller"}
        try:
            outcomes.append(module(**call))
        except Exception as error:
            outcomes.append((type(error), str(error)))
    if isinstance(outcomes[0], Tensor):
        torch.testing.assert_close(*outcomes, rtol=0.0, atol=0.0)
    else:
        assert outcomes[0] == outcomes[1]


def test_grouped_heads_and_scale() -> None:
    class Caller(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return F.scaled_dot_product_attention(*args, **kwargs)

    # One key/value head is broadcast.
    for K, options in ((3, {"enable_gqa": True, "scale": 0.3}), (1, {})):
        module, q, k = Caller(), torch.randn(2, 6, 7, 8), torch.randn(2, K, 9, 8)
        expected = module(q, k, k, None, 0.0, True, **options)
        fastattn.patch(module, quiet=True)
        assert ops_of(module, q, k, k, None, 0.0, True, **options) == ["attention_fwd"]
        torch.testing.assert_close(
            module(q, k, k, None, 0.0, True, **options), expected, atol=1e-5, rtol=1e-4
        )


def test_copies_pickles_and_hooks() -> None:
    model = nn.Sequential(LayerNorm(N), Attention(), _norm("llama"))
    x, kinds = torch.randn(2, 7, N), [type(module) for module in model]
    seen = []
    model[0].register_forward_hook(lambda module, args, y: seen.append(type(module).__name__))
    expected = model(x)
    with fastattn.patch(model, quiet=True):
        assert [type(module) for module in model] != kinds
        assert not fastattn.patch(model, quiet=True).replaced
        others = [copy.deepcopy(model)]
    del model[0]._forward_hooks  # a lambda is not pickled
    model[0]._forward_hooks = {}
    fastattn.patch(model, quiet=True)
    others.append(pickle.loads(pickle.dumps(model)))
    for other in others:
        assert [type(module) for module in other] == [type(module) for module in model]
        torch.testing.assert_close(other(x), expected, atol=1e-5, rtol=1e-4)
        fastattn.unpatch(other)
        assert [type(module) for module in other] == kinds
        assert torch.equal(other(x), expected)
    assert set(seen) == {"LayerNorm"} and len(seen) >= 3


def test_a_class_that_is_not_recognized_when_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = LayerNorm(N), torch.randn(2, N)
    expected = module(x)
    fastattn.patch(module, quiet=True)
    stored = pickle.dumps(module)
    monkeypatch.setattr(foreign_modules, "drop_in", lambda kind, was_seen: None)
    other = pickle.loads(stored)
    assert type(other) is LayerNorm
    assert torch.equal(other(x), expected)
    fastattn.unpatch(other)
    assert type(other) is LayerNorm


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torch_jit_script_compiles_the_published_code() -> None:
    model = nn.Sequential(LayerNorm(N), RmsNorm(N))
    x = torch.randn(2, 7, N)
    expected = model(x)
    fastattn.patch(model, quiet=True)
    torch.testing.assert_close(torch.jit.script(model)(x), expected, atol=1e-5, rtol=1e-4)


PACKAGE = """
import torch
import torch.nn.functional as F

def scaled(x):
    return x * {factor}

class Attention(torch.nn.Module):
    def attend(self, q):
        return F.scaled_dot_product_attention(q, scaled(q), q)

    {more}

    def forward(self, q):
        return {call}
"""


def _package(path: Any, **parts: Any) -> Any:
    """A module of a package of its own."""
    path.write_text(PACKAGE.format(**{"factor": 1.0, "more": "", "call": "self.attend(q)"} | parts))
    known: dict[str, Any] = {"__name__": path.stem}
    exec(compile(path.read_text(), str(path), "exec"), known)
    return known["Attention"]()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("call", ["self.attend(q)", "F.relu(self.attend(scaled(q)))"])
def test_torch_jit_script_reads_the_globals_of_each_package(call: str, tmp_path: Any) -> None:
    q = torch.randn(2, 3, 7, 8)
    for factor in (2.0, 5.0):
        model = _package(tmp_path / f"by_{factor}.py", factor=factor, call=call)
        expected = model(q)
        fastattn.patch(model, quiet=True, example=((q,), {}))
        torch.testing.assert_close(torch.jit.script(model)(q), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "parts",
    [{"more": "also = attend", "call": "self.also(q)"}, {"call": "Attention.attend(self, q)"}],
)
def test_methods_by_other_names_are_answered(parts: dict[str, str], tmp_path: Any) -> None:
    module, q = _package(tmp_path / "package.py", **parts), torch.randn(2, 3, 7, 8)
    fastattn.patch(module, quiet=True, example=((q,), {}))
    assert ops_of(module, q) == ["attention_fwd"]


def test_patching_others_keeps_what_is_compiled() -> None:
    model, x = nn.Sequential(nn.LayerNorm(N), nn.Linear(N, N)), torch.randn(2, N)
    fastattn.patch(model, quiet=True)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    expected = compiled(x)
    kind = type("Later", (LayerNorm,), {})
    assert fastattn.patch(kind(N), quiet=True).replaced
    with torch.compiler.set_stance("fail_on_recompile"):
        assert torch.equal(compiled(x), expected)


def test_export() -> None:
    model, x = nn.Sequential(LayerNorm(N), Attention()).eval(), torch.randn(2, 7, N)
    expected = model(x)
    fastattn.patch(model, quiet=True)
    program = torch.export.export(model, (x,))
    targets = {str(node.target) for node in program.graph.nodes}
    assert {"fastattn.layer_norm_fwd.default", "fastattn.attention_fwd.default"} <= targets
    torch.testing.assert_close(program.module()(x), expected, atol=1e-5, rtol=1e-4)

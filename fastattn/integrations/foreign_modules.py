"""Drop-ins for classes of other packages, such as timm and transformers, that `patch` converts to.

A class is recognized by its code, not by its name: the Python code of `forward`, and of methods
that `forward` calls, must be that of a form published below, on the same functions of torch. So
the many copies of Llama's norm are converted whatever they are called, and a class that differs in
one operation is not. `plain_syntax` says which spellings of the same code are one. A module whose
`forward` calls `scaled_dot_product_attention` keeps its code, in which that call is answered by
`attention`.

The drop-in is a subclass of the class, made at the first use. Calls that it does not support (see
each form) run the class's own `forward`.
"""

import ast
import functools
import inspect
import math
import re
import textwrap
import tokenize
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from fastattn import functional
from fastattn.integrations import foreign_attention
from fastattn.integrations.plain_syntax import Syntax, plain_syntax
from fastattn.integrations.sdpa import ATTENTION_MODE, Answering, answering
from fastattn.nn import norm
from fastattn.nn.conversion import PLAIN_CLASSES, names
from fastattn.nn.fusion import AFFINE, attribute, in_class, is_plain_tensor

Forward = Callable[..., Tensor]
# Attribute of a position on the device: the number of positions of its cache, which bounds it.
POSITION_LIMIT = "_fastattn_limit"
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # published code computes in fp32
# Values of the globals' names in the published code.
_MEANING = {
    "torch": torch,
    "nn": nn,
    "F": torch.nn.functional,
    "math": math,
    "rms_norm": torch.nn.functional.rms_norm,
}
_FORMS: list[tuple[str, Callable[[Any], Forward]]] = []


def _form(published: str) -> Callable[[Callable[[Any], Forward]], Callable[[Any], Forward]]:
    """Decorates a function that makes the drop-in's `forward`, given the class with the published
    code.
    """

    def add(make: Callable[[Any], Forward]) -> Callable[[Any], Forward]:
        _FORMS.append((published, lambda kind: _with_its_name(kind, make(kind))))
        return make

    return add


def _with_its_name(kind: Any, forward: Forward) -> Forward:
    """`forward`, whose argument may be passed by the name that it has in the class."""
    names, known = (list(inspect.signature(f).parameters) for f in (kind.forward, forward))
    if len(names) != 2 or names == known:  # self and one argument
        return forward

    def renamed(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        if names[1] in kwargs:
            args = (*args, kwargs.pop(names[1]))
        return forward(self, *args, **kwargs)

    return renamed


# -- transformers ---------------------------------------------------------------------------------
def _rms(x: Tensor, weight: Tensor | None, eps: Any) -> Tensor | None:
    """`rms_norm` in x's dtype; None where the published code must run."""
    covered = (
        is_plain_tensor(x)
        and x.dtype in _DTYPES
        and x.layout is torch.strided
        and x.dim() > 0
        and norm.is_valid_eps(eps)
    )
    if not covered:
        return None
    if weight is not None and not (
        is_plain_tensor(weight)
        and weight.shape == x.shape[-1:]
        and weight.device == x.device
        and weight.dtype in (x.dtype, torch.float32)
    ):
        return None
    y = functional.rms_norm(x, weight, eps)
    # The published code computes element by element, which keeps the order of x in memory.
    return y if y.stride() == x.stride() else torch.empty_like(x).copy_(y)


@_form("""
def forward(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)
""")
def _llama(kind: Any) -> Forward:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        x, weight = hidden_states, self.weight
        if weight.dtype is x.dtype:
            y = _rms(x, weight, self.variance_epsilon)
        else:  # the product has the wider dtype
            y = _rms(x, None, self.variance_epsilon)
            y = None if y is None else weight * y
        return kind.forward(self, x) if y is None else y

    return forward


@_form("""
def forward(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return (self.weight * hidden_states).to(input_dtype)
""")
@_form("""
def forward(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return (self.weight.to(torch.float32) * hidden_states).to(input_dtype)
""")
def _olmo(kind: Any) -> Forward:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        y = _rms(hidden_states, self.weight, self.variance_epsilon)
        return kind.forward(self, hidden_states) if y is None else y

    return forward


@_form("""
def forward(self, hidden_states):
    variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    if self.weight.dtype in [torch.float16, torch.bfloat16]:
        hidden_states = hidden_states.to(self.weight.dtype)
    return self.weight * hidden_states
""")
def _t5(kind: Any) -> Forward:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        y = None
        if self.weight.dtype is hidden_states.dtype:
            y = _rms(hidden_states, self.weight, self.variance_epsilon)
        return kind.forward(self, hidden_states) if y is None else y

    return forward


@_form("""
def _norm(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

def forward(self, x):
    output = self._norm(x.float())
    output = output * (1.0 + self.weight.float())
    return output.type_as(x)
""")
def _gemma(kind: Any) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = _rms(x, 1.0 + self.weight.float(), self.eps)
        return kind.forward(self, x) if y is None else y

    return forward


@_form("""
def _norm(self, hidden_states):
    mean_squared = hidden_states.pow(2).mean(-1, keepdim=True) + self.eps
    return hidden_states * torch.pow(mean_squared, -0.5)

def forward(self, hidden_states):
    normed_output = self._norm(hidden_states.float())
    if self.with_scale:
        normed_output = normed_output * self.weight.float()
    return normed_output.type_as(hidden_states)
""")
def _gemma4(kind: Any) -> Forward:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        weight = self.weight.float() if self.with_scale else None
        y = _rms(hidden_states, weight, self.eps)
        return kind.forward(self, hidden_states) if y is None else y

    return forward


@_form("""
def _norm(self, x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

def forward(self, x):
    output = self._norm(x.float()).type_as(x)
    return output * self.weight
""")
@_form("""
def _norm(self, x):
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps)

def forward(self, x):
    return self._norm(x.float()).type_as(x) * self.weight
""")
def _llama4(kind: Any) -> Forward:
    return _rounded_before_scaling(kind, "weight")


def _rounded_before_scaling(kind: Any, weight_name: str) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        weight = getattr(self, weight_name)
        if weight.dtype is x.dtype:
            y = _rms(x, weight, self.eps)
        else:
            y = _rms(x, None, self.eps)
            y = None if y is None else y * weight
        return kind.forward(self, x) if y is None else y

    return forward


@_form("""
def forward(self, x):
    x_fp32 = x.float()
    normed = (x_fp32 * torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)
    return normed * self.scale
""")
def _torchtune(kind: Any) -> Forward:
    return _rounded_before_scaling(kind, "scale")


@_form("""
def forward(self, features):
    if self.data_format == "channels_first":
        features = features.permute(0, 2, 3, 1)
        features = super().forward(features)
        features = features.permute(0, 3, 1, 2)
    else:
        features = super().forward(features)
    return features
""")
def _convnext(kind: Any) -> Forward:
    computed = norm.rms_norm if issubclass(kind, nn.RMSNorm) else norm.layer_norm

    def forward(self: Any, features: Tensor) -> Tensor:
        first = self.data_format == "channels_first"
        y = computed(self, features.permute(0, 2, 3, 1) if first else features)
        if y is None:
            return kind.forward(self, features)
        return y.permute(0, 3, 1, 2) if first else y

    return forward


@_form("""
def forward(self, input_ids=None, inputs_embeds=None, cache_length=0):
    if input_ids is not None:
        bsz, seq_len = input_ids.size()
        position_ids = self.create_position_ids_from_input_ids(
            input_ids, self.padding_idx, cache_length
        ).to(input_ids.device)
    else:
        bsz, seq_len = inputs_embeds.size()[:-1]
        position_ids = self.create_position_ids_from_inputs_embeds(
            inputs_embeds, cache_length, self.padding_idx
        )
    max_pos = self.padding_idx + 1 + seq_len + cache_length
    if (
        not (is_torchdynamo_compiling() and torch.is_tensor(max_pos))
        and max_pos > self.weights.size(0)
    ):
        self.make_weights(max_pos + self.offset, self.embedding_dim, self.padding_idx)
    return self.weights.index_select(0, position_ids.view(-1)).view(
        bsz, seq_len, self.weights.shape[-1]
    ).detach()
""")
def _m2m100_positions(kind: Any) -> Forward:
    """A recorded step cannot read the position, to compare it with the size of the table, which
    gets the size of the cache before.
    """

    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cache_length: Any = 0,
    ) -> Tensor:
        positions = getattr(cache_length, POSITION_LIMIT, None)
        if positions is None or input_ids is None:
            return kind.forward(  # type: ignore[no-any-return]
                self, input_ids, inputs_embeds, cache_length
            )
        size = self.padding_idx + 1 + positions
        if size > self.weights.size(0):
            with _disable_current_modes():  # the table is not a value of the step
                self.make_weights(size + self.offset, self.embedding_dim, self.padding_idx)
        ids = self.create_position_ids_from_input_ids(input_ids, self.padding_idx, cache_length)
        table: Tensor = self.weights
        return table.index_select(0, ids.view(-1)).view(*ids.shape, -1).detach()

    return forward


# -- timm -----------------------------------------------------------------------------------------
@_form("""
def forward(self, x):
    if self._fast_norm:
        x = fast_layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
    else:
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
    return x
""")
def _timm_layer_norm(kind: Any) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = None if self._fast_norm else norm.layer_norm(self, x)
        return kind.forward(self, x) if y is None else y

    return forward


@_form("""
def forward(self, x):
    x = x.permute(0, 2, 3, 1)
    if self._fast_norm:
        x = fast_layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
    else:
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
    x = x.permute(0, 3, 1, 2)
    return x
""")
def _timm_layer_norm_2d(kind: Any) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = None if self._fast_norm else norm.layer_norm(self, x.permute(0, 2, 3, 1))
        return kind.forward(self, x) if y is None else y.permute(0, 3, 1, 2)

    return forward


@_form("""
def forward(self, x):
    if self._fast_norm:
        x = fast_rms_norm(x, self.normalized_shape, self.weight, self.eps)
    else:
        x = rms_norm(x, self.normalized_shape, self.weight, self.eps)
    return x
""")
def _timm_rms_norm(kind: Any) -> Forward:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = None if self._fast_norm else norm.rms_norm(self, x)
        return kind.forward(self, x) if y is None else y

    return forward


# -- norms that only wrap a norm ------------------------------------------------------------------
def _parameter(name: str) -> str:
    """A weight or bias, as it is or in a dtype, or None."""
    cast = rf"(?P<{name}_cast>\.float\(\)|\.to\(x\.dtype\))?"
    return rf"(?:None|self\.(?P<{name}>\w+){cast}(?: if self\.(?P={name}) is not None else None)?)"


# Names in a form that stand for one of several expressions, as regular expressions.
_ANY = {
    "SHAPE": r"(?:self\.(?P<shape>\w+(?:\.shape)?)|[([]x\.shape\[-1\],?[)\]]|x\.shape\[-1:\])",
    "WEIGHT": _parameter("weight"),
    "BIAS": _parameter("bias"),
    "EPS": r"(?:None|self\.(?P<eps>\w+)|(?P<number>[\d.e-]+))",
}


class _Norm:
    """The attributes of a module that the functions of `fastattn.nn.norm` read."""

    def __init__(self, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: Any) -> None:
        self.normalized_shape, self.weight, self.bias, self.eps = shape, weight, bias, eps


def _wrapped(kind: Any, published: str) -> Forward:
    """`published` casts x to fp32, its result to x's dtype, both or neither."""
    found = _found(kind, published) or {}
    casts, restores = "(x.float()" in published, published.endswith(".to(x.dtype)")
    rms = "rms_norm" in published or issubclass(kind, nn.RMSNorm)
    computed = norm.rms_norm if rms else norm.layer_norm
    attributes: dict[str, Any] = found
    if "super()" in published:
        attributes = {"shape": "normalized_shape", "weight": "weight", "bias": "bias", "eps": "eps"}
    weight_name, bias_name, eps_name = map(attributes.get, ("weight", "bias", "eps"))
    shape_path = (attributes.get("shape") or "").split(".")
    number = None if (text := found.get("number")) is None else float(text)

    def cast(name: str, p: Tensor | None, x: Tensor) -> Tensor | None:
        if p is None or (how := found.get(f"{name}_cast")) is None:
            return p
        return p.float() if how == ".float()" else p.to(x.dtype)

    def forward(self: Any, x: Tensor) -> Tensor:
        y, is_covered = None, False
        if is_plain_tensor(x) and (dtype := x.dtype) in _DTYPES and x.dim() > 0:
            weight: Any = attribute(self, weight_name) if weight_name else None
            bias = None if rms or not bias_name else attribute(self, bias_name)
            if shape_path == [weight_name, "shape"]:
                shape = weight.shape
            else:
                shape = (
                    functools.reduce(getattr, shape_path, self) if shape_path[0] else x.shape[-1:]
                )
            is_covered = isinstance(shape, tuple)
            if not (
                dtype is torch.float32  # so that no cast changes anything
                and (weight is None or (weight.dtype is dtype and weight.shape == shape))
                and (bias is None or (bias.dtype is dtype and bias.shape == shape))
            ):
                weight, bias = cast("weight", weight, x), cast("bias", bias, x)
                wider = torch.float32 if casts else dtype
                is_covered &= _fits(weight, shape, wider) and _fits(bias, shape, wider)
        if is_covered:
            eps = attribute(self, eps_name) if eps_name else number
            y = computed(_Norm(shape, weight, bias, eps), x)
        if y is None:
            return kind.forward(self, x)  # type: ignore[no-any-return]
        return y.to(dtype) if restores and y.dtype is not dtype else y

    return forward


def _fits(p: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether ops accept p, of this dtype or fp32."""
    return p is None or (
        is_plain_tensor(p) and p.shape == shape and (p.dtype is torch.float32 or p.dtype is dtype)
    )


_CALLS = (
    "super().forward({})",
    "F.layer_norm({}, SHAPE, WEIGHT, BIAS, EPS)",
    "F.rms_norm({}, SHAPE, WEIGHT, EPS)",
)
_RESULTS = (
    *(call.format("x") for call in _CALLS),
    *(call.format(x) + ".to(x.dtype)" for call in _CALLS for x in ("x", "x.float()")),
)
for _published in (f"def forward(self, x): return {result}" for result in _RESULTS):
    _form(_published)(functools.partial(_wrapped, published=_published))


# -- attention ------------------------------------------------------------------------------------
def _with_attention(kind: Any) -> dict[str, Any]:
    """The methods that call scaled_dot_product_attention, with another name for it; `forward`
    within a mode if others call it, too, or the code is not simple.
    """
    own = list(_methods(kind))
    called = [f.__globals__.get(name) for f in own for name in f.__code__.co_names]
    methods: dict[str, Any] = {}
    for function in (*own, *(f for f in called if type(f) is types.FunctionType)):
        if "scaled_dot_product_attention" in names(function.__code__):
            name, tree, answered = function.__name__, _tree(function), None
            if tree is not None and _is_found_by_its_name(kind, function):
                answered = answering(function, tree)
            if answered is None:
                return {"forward": _answered(kind, "forward")}
            methods[name] = _answered(kind, name, answered)
    return methods or {"forward": _answered(kind, "forward")}


def _is_found_by_its_name(kind: Any, function: types.FunctionType) -> bool:
    """Whether a method is `forward`, or is used in its class by calls self.name(...) alone."""
    name = function.__name__
    places = [n for base in kind.__mro__ for n, each in vars(base).items() if each is function]
    if places != [name] or inspect.getattr_static(kind, name) is not function:
        return False
    for method in _methods(kind) if name != "forward" else ():
        if name not in names(method.__code__):
            continue
        if (tree := _tree(method)) is None:
            return False
        nodes = list(ast.walk(tree))
        calls = [node.func for node in nodes if isinstance(node, ast.Call)]
        used = [n for n in nodes if name in (getattr(n, "attr", None), getattr(n, "id", None))]
        if any(n not in calls or ast.unparse(n) != f"self.{name}" for n in used):
            return False
    return True


def _answered(kind: Any, name: str, answered: Answering | None = None) -> Forward:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        published = getattr(kind, name)
        if answered is not None and answered.is_valid(published):
            return answered.function(self, *args, **kwargs)
        with ATTENTION_MODE:
            return published(self, *args, **kwargs)

    return method


def _methods(kind: Any) -> Iterator[types.FunctionType]:
    """The functions of a module's class, without their decorators."""
    for base in kind.__mro__:
        for method in () if base.__module__.startswith("torch.") else vars(base).values():
            found: Any = method.fget if type(method) is property else method
            function = inspect.unwrap(getattr(found, "__func__", found))
            if isinstance(function, types.FunctionType):
                yield function


@functools.cache
def names_in(kind: Any) -> frozenset[str]:
    """The names of globals and attributes in the methods of a module's class."""
    return frozenset().union(*(names(method.__code__) for method in _methods(kind)))


def chooses_backend(kind: Any) -> bool:
    """Whether the class itself chooses backends of scaled_dot_product_attention."""
    return bool({"sdpa_kernel", "sdp_kernel"} & names_in(kind))


def calls_sdpa(function: types.FunctionType) -> bool:
    """Whether the code of the function itself calls scaled_dot_product_attention."""
    return "scaled_dot_product_attention" in function.__code__.co_names


# -- recognizing ----------------------------------------------------------------------------------
def drop_in(kind: Any, was_seen: bool = False) -> type[nn.Module] | None:
    """The drop-in for a class of another package; None if its code is none of the forms.

    was_seen: whether it was seen to call scaled_dot_product_attention, wherever in its code.
    """
    original = getattr(kind, "forward", None)
    of_torch = kind.__module__.startswith("torch.")
    if not isinstance(original, types.FunctionType) or of_torch or "replaces" in kind.__dict__:
        return None
    if chooses_backend(kind):
        return _made(kind, False)
    return _made(kind, was_seen or calls_sdpa(original))


@functools.cache
def _made(kind: Any, has_sdpa: bool) -> type[nn.Module] | None:
    for published, make in _FORMS:
        if _has_code(kind, published):
            methods: dict[str, Any] = {"forward": make(kind)}
            break
    else:
        for published, make_methods in foreign_attention.FORMS:
            if _has_code(kind, published):
                methods = make_methods(kind)
                break
        else:
            if not has_sdpa:
                return None
            methods = _with_attention(kind)
    for name, method in methods.items():
        published = getattr(kind, name)
        methods[name] = functools.wraps(published)(_with_names_of(published, method))

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        _, _, *state = super(made, self).__reduce_ex__(protocol)
        return _rebuild, (kind, has_sdpa), *state

    made: Any = type(
        kind.__name__,
        (kind,),
        {
            "__doc__": kind.__doc__,
            "__module__": kind.__module__,
            "__reduce_ex__": reduce,
            **methods,
            "replaces": kind,
        },
    )
    if not in_class(made, AFFINE):
        PLAIN_CLASSES.add(made)
    return made  # type: ignore[no-any-return]


def _with_names_of(published: Any, method: Any) -> Any:
    """The method with globals of its own, the published code's among them: `torch.jit.script`
    compiles this code, which it finds by `__wrapped__`, but looks up its names in the method.
    """
    known = published.__globals__
    used = {name for name in names(published.__code__) if not name.startswith("__")}
    known = {name: known[name] for name in used & known.keys()}
    code, own = method.__code__, method.__globals__
    taken = {name: own[name] for name in names(code) & own.keys()} | dict.fromkeys(code.co_freevars)
    if any(taken.get(name, value) is not value for name, value in known.items()):
        _fastattn_method = method

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _fastattn_method(self, *args, **kwargs)

    return types.FunctionType(
        method.__code__, own | known, method.__name__, method.__defaults__, method.__closure__
    )


def _rebuild(kind: Any, was_seen: bool = False) -> Any:
    # Where it is unpickled, the class may be that of another version.
    made = drop_in(kind, was_seen) or kind
    return made.__new__(made)


def _has_code(kind: type[nn.Module], published: str) -> bool:
    return _found(kind, published) is not None


def _found(kind: type[nn.Module], published: str) -> dict[str, str | None] | None:
    """The parts of the class's code that names in `_ANY` stand for; None if its code differs."""
    parts: dict[str, str | None] = {}
    for name, wanted in _patterns(published).items():
        definer = next((base for base in kind.__mro__ if name in base.__dict__), None)
        given = _unwrapped(definer.__dict__[name]) if definer is not None else None
        if not isinstance(given, types.FunctionType) or (syntax := _syntax(given)) is None:
            return None
        match, used = wanted.fullmatch(syntax.code), syntax.names & _MEANING.keys()
        if match is None or any(given.__globals__.get(n) is not _MEANING[n] for n in used):
            return None
        if given.__closure__ is not None:  # super().forward
            after = kind.__mro__[kind.__mro__.index(definer) + 1]  # type: ignore[arg-type]
            known = after is nn.LayerNorm or after is nn.RMSNorm
            if not known or given.__closure__[0].cell_contents is not definer:
                return None
        parts |= match.groupdict()
    return parts


def _unwrapped(method: Any) -> Any:
    """The function of a static method, or of one that records no gradients."""
    if isinstance(method, staticmethod):
        return method.__func__
    code_of = getattr(method, "__globals__", {}).get("__name__")
    return method.__wrapped__ if code_of == "torch.utils._contextlib" else method


@functools.cache
def _patterns(published: str) -> dict[str, re.Pattern[str]]:
    """For each function, what its plain code must match."""
    patterns = {}
    for function in ast.parse(published).body:
        syntax = plain_syntax(function)
        assert isinstance(function, ast.FunctionDef) and syntax is not None
        parts = re.split(rf"\b({'|'.join(_ANY)})\b", syntax.code)
        pattern = "".join(_ANY.get(part) or re.escape(part) for part in parts)
        patterns[function.name] = re.compile(pattern)
    return patterns


@functools.cache
def _syntax(function: types.FunctionType) -> Syntax | None:
    """The plain code of the function that runs, which a decorator may have replaced."""
    tree = _tree(function)
    return None if tree is None else plain_syntax(tree)


def _tree(function: types.FunctionType) -> ast.stmt | None:
    try:
        lines = inspect.getsource(function.__code__)
        (tree,) = ast.parse(textwrap.dedent(lines)).body
    except (OSError, TypeError, SyntaxError, ValueError, tokenize.TokenError):
        return None  # code without its source
    return tree

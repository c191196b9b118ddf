"""The package's interface in Python: its names, the help, PyTorch's names of arguments."""

import doctest
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastattn
from fastattn import functional

FUNCTIONS = {
    name: function
    for name in functional.__all__
    if inspect.isfunction(function := getattr(functional, name))
}
_LIST = "import fastattn; print(*dir(fastattn)); {}; print(*dir(fastattn))"
_USE = "fastattn.patch, fastattn.nn.LayerNorm, fastattn.testing"


def test_dir_lists_the_public_names() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LIST.format(_USE)], capture_output=True, text=True, check=True
    )
    before, after = (line.split() for line in done.stdout.splitlines())
    modules = ["distributed", "functional", "integrations", "nn", "seq2seq", "testing"]
    assert before == after == sorted([*fastattn.__all__, *modules, "__version__"])
    assert {"patch", "unpatch", "attention"} < set(before)
    for name in before:
        assert getattr(fastattn, name) is not None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_help_names_every_argument(name: str) -> None:
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    named = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    words = set(text.replace(",", " ").replace(":", " ").replace("`", " ").split())
    assert not set(named) - words


def test_examples_of_docstrings_run() -> None:
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    with_examples = []
    for name, function in FUNCTIONS.items():
        for test in finder.find(function, name, globs={}):
            if test.examples:
                with_examples.append(test.name)
                runner.run(test)
    assert "attention" in with_examples
    assert not runner.failures


_Q = torch.randn(1, 2, 5, 8)
_OFFSETS = torch.tensor([0, 5], dtype=torch.int32)
_PACKED = (*[torch.randn(5, 2, 8)] * 3, _OFFSETS, _OFFSETS, 5, 5)
_X, _W = torch.randn(3, 8), torch.randn(8, 8)


@pytest.mark.parametrize(
    "function, arguments, given, hint",
    [
        (fastattn.attention, (_Q,) * 3, "attn_mask", "mask="),
        (fastattn.attention, (_Q,) * 3, "is_causal", "causal="),
        (fastattn.attention, (_Q,) * 3, "dropout", "dropout_p="),
        (fastattn.attention, (_Q,) * 3, "p", "dropout_p="),
        (fastattn.attention, (_Q,) * 3, "enable_gqa", "without an argument"),
        (fastattn.attention, (_Q,) * 3, "softmax_scale", "scale="),
        (fastattn.attention, (_Q,) * 3, "window_size", "window="),
        (fastattn.attention, (_Q,) * 3, "key_padding_mask", "True = may attend"),
        (fastattn.attention, (_Q,) * 3, "need_weights", "attention_with_weights"),
        (fastattn.attention_varlen, _PACKED, "is_causal", "causal="),
        (fastattn.attention_weights, (_Q, _Q), "attn_mask", "mask="),
        (fastattn.add_layer_norm, (_X, _X), "dropout", "dropout_p="),
        (fastattn.ffn, (_X, _W, None, _W, None), "p", "dropout_p="),
    ],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
def test_names_of_other_packages_get_a_hint(
    function: Callable[..., Any], arguments: Any, given: str, hint: str, compiled: bool
) -> None:
    if compiled:
        function = torch.compile(function, backend="eager")
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{given}'.*{hint}"):
        function(*arguments, **{given: None})


@pytest.mark.parametrize(
    "function, arguments",
    [
        (fastattn.attention, (_Q,) * 3),
        (fastattn.attention_varlen, _PACKED),
        (fastattn.attention_weights, (_Q, _Q)),
        (fastattn.attention_with_weights, (_Q,) * 3),
        (fastattn.add_layer_norm, (_X, _X)),
        (fastattn.ffn, (_X, _W, None, _W, None)),
    ],
)
def test_unknown_names_are_refused(function: Callable[..., Any], arguments: Any) -> None:
    wanted = rf"^{function.__name__}\(\) got an unexpected keyword argument 'colour'$"
    with pytest.raises(TypeError, match=wanted):
        function(*arguments, colour=1)


def test_hints_name_arguments_that_the_function_has() -> None:
    """A norm has no mask: Python's own error is enough."""
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'attn_mask'$"):
        fastattn.add_layer_norm(_X, _X, attn_mask=None)  # type: ignore[call-overload]

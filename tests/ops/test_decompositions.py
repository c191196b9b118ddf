"""The decompositions for exported programs: each op in PyTorch's operators."""

from typing import Any

import pytest
import torch
from op_examples import SPECS, as_tuple
from torch._decomp import decomposition_table
from torch.utils._python_dispatch import TorchDispatchMode

import fastattn
from fastattn.ops._select import OPS
from fastattn.testing.oracle import Oracle
from fastattn.testing.spec import OpSpec

FORWARDS = [name for name, op in OPS.items() if not op.is_derivative]
TABLE = fastattn.decompositions()


class Decomposed(TorchDispatchMode):
    """Runs the decomposition of every op of fastattn."""

    calls = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += op in TABLE
        return TABLE.get(op, op)(*args, **kwargs or {})


def test_every_forward_has_one() -> None:
    overloads = {"default", "backend"}
    assert {(op._schema.name, op._overloadname) for op in TABLE} == {
        (f"fastattn::{name}", overload) for name in FORWARDS for overload in overloads
    }


def test_pytorchs_table_has_none() -> None:
    """With an entry there, Inductor refuses to call the op where the variable CI is set, and fake
    tensors of symbolic shapes prefer the decomposition to the fake kernel.
    """
    assert not [op for op in decomposition_table if str(op).startswith("fastattn")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_samples(spec: OpSpec, dtype: torch.dtype) -> None:
    """Every third sample, by its error budget; those with dropout are refused."""
    for sample in spec.samples[:: 3 if dtype is torch.float32 else 7]:
        if dtype not in sample.dtypes or "slow" in sample.tags:
            continue
        inputs = sample.inputs("cpu", dtype)
        with torch.no_grad(), Decomposed() as mode:
            if inputs.get("dropout_p") or inputs.get("output_dropout_p"):
                with pytest.raises(NotImplementedError, match=r"call model\.eval\(\)"):
                    spec.function(**inputs)
                continue
            results = as_tuple(spec.function(**inputs))
        assert mode.calls
        oracle = Oracle(spec, sample, dtype)
        for name, result in zip(spec.results, results, strict=True):
            comparison = oracle.judge(name, result)
            assert comparison.ok, (sample.name, name, comparison)


def test_exported_program_without_ops_of_fastattn() -> None:
    class Block(torch.nn.Module):
        def forward(self, q: torch.Tensor, lengths: torch.Tensor) -> Any:
            return fastattn.attention(q, q, q, key_lengths=lengths, causal=True)

    inputs = torch.randn(2, 2, 5, 8), torch.tensor([5, 0])
    exported = torch.export.export(Block(), inputs)
    targets = [node.target for node in exported.run_decompositions().graph.nodes]
    assert torch.ops.fastattn.attention_fwd.default in targets
    program = exported.run_decompositions(TABLE)
    assert not [node for node in program.graph.nodes if "fastattn" in str(node.target)]
    torch.testing.assert_close(program.module()(*inputs), Block()(*inputs))

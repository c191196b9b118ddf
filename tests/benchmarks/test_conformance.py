"""The implementations of the field: their adapters pass what every implementation can compute."""

import pytest
import torch

from benchmarks import conformance
from examples.conformance import pytorch_cpu
from fastattn.testing import check_implementation, implementation

SAMPLES = ("plain", "top_left_tall", "key_lengths_full", "gqa_bias", "bool_mask_keys",
           "softcap_large", "sinks_gqa", "odd_width", "one_row")  # fmt: skip


@pytest.mark.parametrize("name", conformance.IMPLEMENTATIONS)
def test_implementations(name: str) -> None:
    op, function, package = conformance.IMPLEMENTATIONS[name]
    if package:
        pytest.importorskip(package)
    judged = implementation.load(f"benchmarks.peers.{function}")
    # FlexAttention traces its first calls, which takes seconds.
    samples = ("two_by_two",) if function == "flex:flex" else SAMPLES
    report = check_implementation(
        judged.function, op, device="cpu", dtypes=torch.float32, samples=samples
    )
    report.raise_if_failed()
    line = conformance.summary(name, report, "torch")
    assert line["checks"]["value"] == {"ok": line["checks"]["value"]["ok"]}
    assert not line["raised"]
    no_gradient = (
        "FlexAttention does not support backward on CPU",
        "returns results without a graph",
    )
    reasons = ("takes ", "has ", "limits ", *no_gradient)
    assert all(reason.startswith(reasons) for reason in line["refused"])
    forward = any(reason.startswith(no_gradient) for reason in line["refused"])
    assert forward or line["checks"]["gradient"]["ok"] > 2


def test_backends_of_sdpa() -> None:
    """A backend without a kernel for a sample refuses it."""
    for name, statuses in (("flash", {"ok"}), ("cudnn", {"refused"})):
        function = implementation.load(f"benchmarks.peers.sdpa:sdpa_{name}").function
        report = check_implementation(function, "attention", device="cpu", samples="top_left")
        assert {row.status for row in report.rows if row.kind == "value"} == statuses


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="of torch 2.13")
def test_reproductions() -> None:
    flash, math = pytorch_cpu.SDPBackend.FLASH_ATTENTION, pytorch_cpu.SDPBackend.MATH
    for scale in (0.0, -0.25):
        assert pytorch_cpu.causal_with_scale(scale, flash) == float("inf")
        assert pytorch_cpu.causal_with_scale(scale, math) < 1e-6
    assert min(pytorch_cpu.gradients_of_large_scores(2.0**14, flash)) > 0.1
    assert max(pytorch_cpu.gradients_of_large_scores(2.0**14, math)) < 1e-6
    assert sum(pytorch_cpu.not_finite_gradients(flash)) > 0
    assert sum(pytorch_cpu.not_finite_gradients(math)) == 0
    assert max(pytorch_cpu.gradients_of_two_keys(flash)[:2]) > 1.0
    assert max(pytorch_cpu.gradients_of_two_keys(math)) < 0.01
    error, largest = pytorch_cpu.bias_gradient_of_layer_norm(torch.bfloat16, 1500)
    assert error > 0.01 * largest
    for dtype in (torch.bfloat16, torch.float16):
        assert pytorch_cpu.weights_with_added_number(0.0, dtype) < 0.01
        assert pytorch_cpu.weights_with_added_number(-1e4, dtype) > 0.1


def test_reproductions_with_transformers() -> None:
    pytest.importorskip("transformers")
    from examples.conformance import transformers_cpu

    assert transformers_cpu.not_finite(300.0, torch.float16) == 2080
    assert transformers_cpu.not_finite(300.0, torch.bfloat16) == 0
    for dtype in (torch.bfloat16, torch.float16):
        assert transformers_cpu.error_with(dtype) < 0.01
        assert transformers_cpu.error_with(dtype, number=-1e4) > 0.1
    assert transformers_cpu.error_with(torch.bfloat16, amplitude=1e4) > 0.1
    assert min(transformers_cpu.gradients_beside_a_sink(torch.bfloat16, 30.0)) > 0.005


def test_reproductions_with_onnxruntime() -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    from examples.conformance import onnxruntime_cpu

    assert onnxruntime_cpu.error_with("fp16") < 0.01
    assert onnxruntime_cpu.error_with("fp16", number=-1e4) > 0.1
    assert onnxruntime_cpu.error_with("fp16", amplitude=1e4) == float("inf")
    assert onnxruntime_cpu.error_with("fp32", number=-1e4) < 1e-3

"""Reproduces failures of onnxruntime's operator Attention (opset 23) in fp16 on a CPU that the
conformance page lists, without fastattn: scores, and their sums with a mask, are rounded to fp16
before the softmax.

    python -m examples.conformance.onnxruntime_cpu
"""

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

KINDS = {"fp16": (TensorProto.FLOAT16, np.float16), "fp32": (TensorProto.FLOAT, np.float32)}


def error_with(kind: str, amplitude: float = 1.0, number: float = 0.0) -> float:
    """The largest error for queries of about `amplitude`, with a mask that adds the number to all
    scores, which leaves the softmax as it is; inf if a result is not finite.
    """
    onnx_type, dtype = KINDS[kind]
    names = ("q", "k", "v", "mask")
    inputs = [helper.make_tensor_value_info(n, onnx_type, [None] * 4) for n in names]
    out = helper.make_tensor_value_info("out", onnx_type, [None] * 4)
    node = helper.make_node("Attention", names, ["out"], scale=1.0)
    opset = helper.make_opsetid("", 23)
    graph = helper.make_graph([node], "attention", inputs, [out])
    model = helper.make_model(graph, opset_imports=[opset], ir_version=11).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])

    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((1, 2, 65, 16)).astype(dtype) for _ in range(3))
    q = (q * amplitude).astype(dtype)
    mask = np.full((1, 1, 65, 65), number, dtype)
    (found,) = session.run(None, dict(zip(names, (q, k, v, mask), strict=True)))
    wide = [x.astype(np.float64) for x in (q, k, v)]
    s = wide[0] @ wide[1].swapaxes(-1, -2)
    weights = np.exp(s - s.max(-1, keepdims=True))
    exact = weights / weights.sum(-1, keepdims=True) @ wide[2]
    error = np.abs(found.astype(np.float64) - exact)
    return float(np.nan_to_num(error, nan=np.inf).max())


def main() -> None:
    print(f"onnxruntime {onnxruntime.__version__}")
    for kind in KINDS:
        for amplitude, number in ((1.0, 0.0), (1.0, -1e4), (1e4, 0.0)):
            error = error_with(kind, amplitude, number)
            print(
                f"{kind}, queries of {amplitude:g}, mask of {number:g}: largest error {error:.2g}"
            )


if __name__ == "__main__":
    main()

"""The torch op of the feed-forward network: schemas, shapes of the results, backends in order of
preference.

One hidden tensor is saved: for relu the activation after dropout [..., F], for other activations
the pre-activation ([..., 2F] if gated).
"""

from torch import Tensor

from fastattn.ops._autograd import differentiable
from fastattn.ops._op import Backend, Op
from fastattn.ops.ffn import reference
from fastattn.ops.ffn.calls import BackwardCall, ForwardCall

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", *reference.GATED)
GATED_ACTIVATIONS = tuple(reference.GATED)
_PACKAGE = "fastattn.ops.ffn"
_BACKENDS = (
    Backend("sm90", automatic=False),
    Backend("triton", automatic=False),
    Backend("cpu"),
    Backend("torch"),
    Backend("reference"),
)


def _fwd_outputs(call: ForwardCall) -> tuple[Tensor, ...]:
    x, residual, leading = call.x, call.residual, call.x.shape[:-1]
    dtype = x.dtype if residual is None else residual.dtype
    y = x.new_empty((*leading, call.w2.shape[0]), dtype=dtype)
    return y, x.new_empty((*leading, call.w1.shape[0]))


def _bwd_outputs(call: BackwardCall) -> tuple[Tensor, ...]:
    inputs = zip(call.needs, (call.x, call.w1, call.b1, call.w2, call.b2), strict=True)
    return tuple(
        call.x.new_empty(0 if x is None or not needed else x.shape) for needed, x in inputs
    )


ffn = differentiable(
    Op(
        "ffn_fwd",
        ForwardCall,
        "Tensor y, Tensor hidden",
        _fwd_outputs,
        _PACKAGE,
        _BACKENDS,
        public_name="ffn",
        batched=("x", "residual", "y", "hidden"),
        dropout=("dropout_p", "output_dropout_p"),
    ),
    Op(
        "ffn_bwd",
        BackwardCall,
        "Tensor dx, Tensor dw1, Tensor db1, Tensor dw2, Tensor db2",
        _bwd_outputs,
        _PACKAGE,
        _BACKENDS,
        public_name="ffn",
        data="x",
        contiguous=("dy",),
        batched=("dy", "x", "hidden", "dx"),
        dropout=("dropout_p", "output_dropout_p"),
        is_derivative=True,
    ),
    reference.backward_maths,
    forward_maths=reference.ffn_fwd,
    gradients={"dx": "x", "dw1": "w1", "db1": "b1", "dw2": "w2", "db2": "b2"},
    result_gradients={"y": "dy"},
    passes_through={"residual": "y"},
)

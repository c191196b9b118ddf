"""torch.nn.Transformer, eager and under torch.compile."""

from dataclasses import replace

from torch import nn

from benchmarks.implementations import Implementation
from benchmarks.model import COMPILED_WORKLOADS, MODEL, build_module

_EAGER = Implementation(
    "torch-eager",
    (MODEL,),
    lambda task: build_module(task, nn.Transformer),
)

PEERS = (
    _EAGER,
    replace(
        _EAGER,
        name="torch-compile",
        build=lambda task: build_module(task, nn.Transformer, compiled=True),
        device_types=("cuda",),
        compiles=True,
        workloads=COMPILED_WORKLOADS,
    ),
)

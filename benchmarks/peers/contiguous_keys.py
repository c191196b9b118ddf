"""Beside attention over pages of keys and values, in the same run: fastattn with the same keys in
contiguous tensors, which these workloads have too.
"""

import fastattn
from benchmarks.implementations import Forward, Implementation, Task
from fastattn.testing.spec import Inputs


def _unsupported(task: Task) -> str | None:
    return None if "page" in task.inputs else "is a peer of workloads with pages alone"


def _build(task: Task) -> Forward:
    def forward(inputs: Inputs) -> object:
        return fastattn.attention(**{name: x for name, x in inputs.items() if name != "page"})

    return forward


PEERS = (
    Implementation(
        "contiguous-keys",
        ("attention",),
        _build,
        unsupported=_unsupported,
        version=lambda: fastattn.__version__,
        workloads="_paged",
        directions=("fwd",),
    ),
)

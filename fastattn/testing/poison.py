"""NaN in every result before a backend writes it: what it leaves unwritten is seen."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from torch import Tensor

from fastattn.ops._op import Op


@contextlib.contextmanager
def poisoned_results() -> Iterator[None]:
    """Inside, every op finds its results filled with NaN."""

    def allocate(self: Op, args: Sequence[Any]) -> tuple[Tensor, ...]:
        results = self.outputs(*args)
        for result in results:
            if result.is_floating_point():
                result.fill_(float("nan"))
        return results

    with mock.patch.object(Op, "allocate", allocate):
        yield

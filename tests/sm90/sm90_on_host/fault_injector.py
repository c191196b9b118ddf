"""Injects every fault that a machine supports at every place of its kernels, one at a time.

The machine itself must detect each of them, except those with a reason why they are harmless.
Mutations of the source may also be detected by wrong results.
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sm90_on_host.build import CSRC, FAULTS, LATE, MUTATION, RANDOM, Machine, Mutation, Place
from sm90_on_host.guarded import guarded
from sm90_on_host.host_library import HostLibrary
from torch import Tensor

from fastattn.ops._op import Op

ORDERS = (LATE, RANDOM, RANDOM + 1)


@dataclass(frozen=True)
class Harmless:
    """A fault, a part of the source lines where it is injected, and why it is harmless."""

    fault: str
    source: str
    reason: str


class FaultInjector:
    """run: returns the machine's message; is_same: whether the last run's results are right.
    later: the orders for faults that an earlier call did not detect. ignored: faults that are not
    injected. only_mutations: none of the faults of the machine; only_in: of these those in a file.
    """

    def __init__(
        self,
        machine: Machine,
        mutations: Sequence[Mutation] = (),
        later: Sequence[int] = ORDERS,
        ignored: Sequence[Harmless] = (),
        only_mutations: bool = False,
        only_in: str = "",
    ) -> None:
        self.machine, self.mutations, self.later, self.ignored = machine, mutations, later, ignored
        self.only_mutations, self.only_in = only_mutations, only_in
        self.detected: dict[tuple[int, int], bool] = {}

    def examine(
        self, run: Callable[[], str | None], is_same: Callable[[], bool] = lambda: True
    ) -> str | None:
        """Runs without a fault, then with every fault that has not been detected yet. Returns the
        message of a last run without a fault.
        """
        self.machine.record(True)
        for self.machine.order in ORDERS:
            if failure := run():
                return failure
            assert is_same(), "the results depend on the order"
            if self.machine.order == ORDERS[0]:  # runs that record take three times as long
                places = [place for place in self.machine.places() if self._injects(place)]
                self.machine.record(False)
        for place in places:
            if not self.detected.get(place.key):
                orders = self.later if place.key in self.detected else ORDERS
                self.detected[place.key] = self._detects(run, is_same, place, orders)
        return run()

    def _injects(self, place: Place) -> bool:
        if place.fault == MUTATION:
            return True
        here = not self.only_in or self.only_in in self.machine.source(place.address)
        return here and not self.only_mutations and not self._is_one_of(self.ignored, place.key)

    def _detects(
        self,
        run: Callable[[], str | None],
        is_same: Callable[[], bool],
        place: Place,
        orders: Sequence[int],
    ) -> bool:
        self.machine.inject(place)
        try:
            for self.machine.order in orders:
                if run() is not None or (place.fault == MUTATION and not is_same()):
                    return True
        finally:
            self.machine.inject(None)
        return False

    def undetected(self, harmless: Sequence[Harmless] = ()) -> list[str]:
        """Descriptions of undetected faults, except the harmless ones."""
        keys = [key for key, detected in self.detected.items() if not detected]
        return [": ".join(self._described(k)) for k in keys if not self._is_one_of(harmless, k)]

    def unused(self, harmless: Sequence[Harmless]) -> list[Harmless]:
        """Entries of `harmless` whose faults are detected or do not exist."""
        keys = [key for key, detected in self.detected.items() if not detected]
        return [h for h in harmless if not any(self._is_one_of([h], key) for key in keys)]

    def unreached(self) -> list[Mutation]:
        return [m for i, m in enumerate(self.mutations) if (MUTATION, i) not in self.detected]

    def _is_one_of(self, harmless: Sequence[Harmless], key: tuple[int, int]) -> bool:
        fault = FAULTS[key[0]]  # compared first: another process finds lines of source
        return any(fault == h.fault and h.source in self._described(key)[1] for h in harmless)

    def _described(self, key: tuple[int, int]) -> tuple[str, str]:
        fault, where = key
        if fault == MUTATION:
            mutation = self.mutations[where]
            return FAULTS[fault], f"{mutation.right} -> {mutation.wrong}"
        return FAULTS[fault], _lines(self.machine, where)


class OpInjector(FaultInjector):
    """Examines the launches of an op, in the place of a machine. Tensors are guarded on both sides;
    before every run, what the op writes is poisoned. All runs must return the bits of the first.

    host: which calls the machine. run_op(op, args, results): what writes into the results.
    """

    inputs: list[tuple[Tensor, Tensor]]
    results: list[Tensor]
    expected: list[Tensor]

    def __init__(
        self,
        host: HostLibrary,
        run_op: Callable[[Op, Sequence[Any], Sequence[Tensor]], object],
        machine: Machine,
        mutations: Sequence[Mutation] = (),
        **options: Any,
    ) -> None:
        super().__init__(machine, mutations, **options)
        self.host, self.run_op = host, run_op

    def launch(self, op: Op, args: Sequence[Any]) -> Sequence[Tensor]:
        results = op.allocate(args)
        self.results, self.expected = [guarded(x) for x in results], []
        given = tuple(guarded(x) if isinstance(x, Tensor) else x for x in args)
        tensors = [x for x in given if isinstance(x, Tensor) and 0 not in x.stride()]
        self.inputs = [(x, x.clone()) for x in tensors]
        self.run_op(op, given, self.results)
        for result, own in zip(results, self.results, strict=True):
            result.copy_(own)
        return results

    def call(self, function: str, *arguments: object) -> str | None:
        return self.examine(partial(self._run, function, *arguments), self._is_same)

    def _run(self, function: str, *arguments: object) -> str | None:
        for x, kept in self.inputs:  # a fault may have overwritten them
            x.copy_(kept)
        for x in self.results:
            x.fill_(torch.nan)
        self.host.poison_workspace()
        message = self.machine.call(function, *arguments)
        if not self.expected:
            self.expected = [x.clone() for x in self.results]
        return message

    def _is_same(self) -> bool:
        return all(
            torch.equal(x.contiguous().view(torch.uint8), kept.contiguous().view(torch.uint8))
            for x, kept in zip(self.results, self.expected, strict=True)
        )


@functools.cache
def _lines(machine: Machine, address: int) -> str:
    """The line of source at an address, after the line before it, and those that call it."""
    places = re.findall(r"([\w./]+):(\d+)", machine.source(address))
    paths = {str(path.relative_to(CSRC)): path for path in CSRC.rglob("*.cuh")}
    files = {name: path.read_text().splitlines() for name, path in paths.items()}
    lines = [files[name][int(n) - 2 : int(n)] for name, n in places if name in files]
    return " < ".join(" ".join(line.strip() for line in pair) for pair in lines)

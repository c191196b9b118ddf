"""Injects every fault that a machine supports at every place of its kernels, one at a time.

The machine itself must detect each of them, except those with a reason why they are harmless.
Mutations of the source may also be detected by wrong results.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sm90_on_host.build import CSRC, FAULTS, LATE, MUTATION, RANDOM, Machine, Mutation, Place

ORDERS = (LATE, RANDOM, RANDOM + 1)


@dataclass(frozen=True)
class Harmless:
    """A fault, a part of the source lines where it is injected, and why it is harmless."""

    fault: str
    source: str
    reason: str


class FaultInjector:
    """run: returns the machine's message; is_same: whether the last run's results are right.
    later: the orders for faults that an earlier call did not detect. only_mutations: none of the
    faults of the machine.
    """

    def __init__(
        self,
        machine: Machine,
        mutations: Sequence[Mutation] = (),
        later: Sequence[int] = ORDERS,
        only_mutations: bool = False,
    ) -> None:
        self.machine, self.mutations, self.later = machine, mutations, later
        self.only_mutations = only_mutations
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
        places = [
            place
            for place in self.machine.places()
            if place.fault == MUTATION or not self.only_mutations
        ]
        self.machine.record(False)
        for place in places:
            if not self.detected.get(place.key):
                orders = self.later if place.key in self.detected else ORDERS
                self.detected[place.key] = self._detects(run, is_same, place, orders)
        return run()

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
        return [
            f"{fault}: {lines}"
            for fault, lines in map(self._described, keys)
            if not any(fault == h.fault and h.source in lines for h in harmless)
        ]

    def unused(self, harmless: Sequence[Harmless]) -> list[Harmless]:
        """Those of `harmless` whose faults are detected or do not exist."""
        keys = [key for key, detected in self.detected.items() if not detected]
        described = [self._described(key) for key in keys]
        return [
            h for h in harmless if not any(f == h.fault and h.source in s for f, s in described)
        ]

    def unreached(self) -> list[Mutation]:
        return [
            mutation
            for number, mutation in enumerate(self.mutations)
            if (MUTATION, number) not in self.detected
        ]

    def _described(self, key: tuple[int, int]) -> tuple[str, str]:
        fault, where = key
        if fault == MUTATION:
            mutation = self.mutations[where]
            return FAULTS[fault], f"{mutation.right} -> {mutation.wrong}"
        return FAULTS[fault], _lines(self.machine, where)


def _lines(machine: Machine, address: int) -> str:
    """The line of source at an address, after the line before it, and those that call it."""
    places = re.findall(r"([\w./]+):(\d+)", machine.source(address))
    paths = {str(path.relative_to(CSRC)): path for path in CSRC.rglob("*.cuh")}
    files = {name: path.read_text().splitlines() for name, path in paths.items()}
    lines = [files[name][int(n) - 2 : int(n)] for name, n in places if name in files]
    return " < ".join(" ".join(line.strip() for line in pair) for pair in lines)

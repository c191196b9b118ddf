"""Commits every fault that a machine knows of at every place of its kernels, one at a time.

Each must be noticed by the machine itself, all but those that say why they are harmless. Mutations
of the source may also show in what the kernels compute.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sm90_on_host.build import CSRC, FAULTS, LATE, MUTATION, RANDOM, Machine, Mutation, Place

ORDERS = (LATE, RANDOM, RANDOM + 1)


@dataclass(frozen=True)
class Harmless:
    """A fault, what the lines of source have that it is committed at, and why it does no harm."""

    fault: str
    source: str
    reason: str


class FaultInjector:
    """run: returns the machine's message; is_same: whether the last run's results are right.
    later: the orders in which it runs again with a fault that an earlier call did not notice.
    """

    def __init__(
        self,
        machine: Machine,
        mutations: Sequence[Mutation] = (),
        later: Sequence[int] = ORDERS,
    ) -> None:
        self.machine, self.mutations, self.later = machine, mutations, later
        self.noticed: dict[tuple[int, int], bool] = {}

    def examine(
        self, run: Callable[[], str | None], is_same: Callable[[], bool] = lambda: True
    ) -> str | None:
        """Runs once as it should, then with every fault that has not been noticed yet. The message
        of a run without a fault, afterwards.
        """
        self.machine.record(True)
        for self.machine.order in ORDERS:
            if failure := run():
                return failure
            assert is_same(), "the results depend on the order"
        places = self.machine.places()
        self.machine.record(False)
        for place in places:
            if not self.noticed.get(place.key):
                orders = self.later if place.key in self.noticed else ORDERS
                self.noticed[place.key] = self._notices(run, is_same, place, orders)
        return run()

    def _notices(
        self,
        run: Callable[[], str | None],
        is_same: Callable[[], bool],
        place: Place,
        orders: Sequence[int],
    ) -> bool:
        self.machine.commit(place)
        try:
            for self.machine.order in orders:
                if run() is not None or (place.fault == MUTATION and not is_same()):
                    return True
        finally:
            self.machine.commit(None)
        return False

    def unnoticed(self, harmless: Sequence[Harmless] = ()) -> list[str]:
        """Descriptions of faults, all but the harmless ones."""
        keys = [key for key, noticed in self.noticed.items() if not noticed]
        return [
            f"{fault}: {lines}"
            for fault, lines in map(self._described, keys)
            if not any(fault == h.fault and h.source in lines for h in harmless)
        ]

    def unused(self, harmless: Sequence[Harmless]) -> list[Harmless]:
        """Excuses for faults that are noticed, or that there are none of."""
        keys = [key for key, noticed in self.noticed.items() if not noticed]
        described = [self._described(key) for key in keys]
        return [
            h for h in harmless if not any(f == h.fault and h.source in s for f, s in described)
        ]

    def unreached(self) -> list[Mutation]:
        return [
            mutation
            for number, mutation in enumerate(self.mutations)
            if (MUTATION, number) not in self.noticed
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

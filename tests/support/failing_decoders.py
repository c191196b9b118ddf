"""Decoders for `benchmarks.own_process` that fail: processes import them by name."""

import os
from pathlib import Path
from typing import NoReturn

from benchmarks.own_process import Decode, DecoderTask, Tokens


def fail_to_build(builds: Path, task: DecoderTask) -> NoReturn:
    with builds.open("a") as file:
        file.write("built\n")
    raise ValueError("no such model")


def exit_when_called(task: DecoderTask) -> Decode:
    def decode(source: Tokens) -> NoReturn:
        os._exit(7)

    return decode

"""For every test: one torch thread per worker, the same random numbers, the device to test on."""

import gc
import os

import pytest
import torch
from cli_runs import pairs_file as pairs_file
from cli_runs import run_folder as run_folder
from cpu_library import isa as isa
from probe_op import make_op as make_op
from probe_op import no_request as no_request
from products import torch_is_faster as torch_is_faster

from fastattn.ops import _env, _native

try:
    import hypothesis
except ImportError:  # part of the development extra only
    pass
else:
    hypothesis.settings.register_profile("fastattn", derandomize=True, deadline=None)
    hypothesis.settings.load_profile("fastattn")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--python-derivatives",
        action="store_true",
        help="derivatives in Python, as where the extension autograd is not built",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--python-derivatives"):
        _native.extension = lambda: None
    gc.disable()  # objects made by collecting tests are kept
    os.environ[_env.RECORD_VARIABLE] = ""  # the same choices on every machine
    # Code cached by inductor would call ops by older schemas.
    torch.compiler.config.force_disable_caches = True
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"  # for the subprocesses of tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Not by keywords, which include the names of folders.
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU if there is one."""
    return _env.default_device()

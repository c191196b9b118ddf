"""Every run-time gate: what is installed, which devices a backend serves, what the environment asks
for.

Nothing else in the package asks for versions, devices or architectures.
Answers are reasons (strings phrased to follow "backend triton ...") or None for "nothing in the
way".
"""

import functools
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

BACKEND_VARIABLE = "FASTATTN_BACKEND"
RECORD_VARIABLE = "FASTATTN_RECORD"
_INTERPRET_VARIABLE = "TRITON_INTERPRET"
CPU = torch.device("cpu")
_NO_REQUEST: Mapping[str, str] = MappingProxyType({})
# os.environ encodes a key each time it looks, which is most of its 0.5 us.
_KEYS = {
    name: getattr(os.environ, "encodekey", str)(name)
    for name in (BACKEND_VARIABLE, _INTERPRET_VARIABLE)
}


def _variable(name: str) -> str | None:
    """os.environ.get(name), quicker for a variable that is not set, as at nearly every call."""
    try:
        if _KEYS[name] not in os.environ._data:  # type: ignore[attr-defined]
            return None
    except AttributeError:
        pass  # another mapping in its place, or another Python's
    return os.environ.get(name)


def requested_backends() -> Mapping[str, str]:
    """The backends that FASTATTN_BACKEND asks for, by op, under "" the one for every op: a name, or
    pairs such as "attention=triton,ffn=cpu".
    """
    value = _variable(BACKEND_VARIABLE)
    return _parse_request(value) if value else _NO_REQUEST


def _parse_request(value: str) -> dict[str, str]:
    request = {}
    for item in value.split(","):
        op, _, name = item.rpartition("=")
        request[op.strip()] = name.strip()
    return request


def record_path() -> Path | None:
    """Where the record of verified kernels lies: what FASTATTN_RECORD names (empty: nowhere, there
    is none), or fastattn/verified.json in the user's cache folder.
    """
    named = os.environ.get(RECORD_VARIABLE)
    if named is not None:
        return Path(named) if named else None
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # which XDG's specification wants ignored
        cache = os.path.expanduser("~/.cache")
    return Path(cache, "fastattn", "verified.json")


def torch_version() -> str:
    return str(torch.__version__)


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter, which takes CPU tensors."""
    return _variable(_INTERPRET_VARIABLE) == "1"


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def refuses_device(backend: str, device: torch.device) -> str | None:
    """Why a backend cannot serve a device, asked before its module is imported."""
    if backend == "cpu":
        # Reading a device's type takes 0.2 us.
        if device == CPU or device.type == "cpu":
            return None
        return f"runs on cpu tensors, got {device.type}"
    if backend == "triton":
        if device.type != "cuda" and not (device.type == "cpu" and interpreting()):
            return f"runs on cuda tensors, got {device.type}"
        return None if has_triton() else "needs the triton package, which is not installed"
    if backend == "sm90":
        if device.type != "cuda":
            return f"runs on cuda tensors, got {device.type}"
        major, minor = capability(device.index or 0)
        if torch.version.hip is not None or (major, minor) != (9, 0):
            return f"is built for Hopper (compute capability 9.0), got {major}.{minor}"
    return None


@functools.cache
def capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def architecture(device_type: str, index: int) -> str:
    """The name that configuration tables use: sm_90, gfx942, ... or "interpreter"."""
    if device_type != "cuda":
        return "interpreter"
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
    major, minor = capability(index)
    return f"sm_{major}{minor}"


@functools.cache
def multiprocessors(device_type: str, index: int) -> int:
    """Of a GPU; for what stands in for one, those of an H200."""
    if device_type != "cuda":
        return 132
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def several_gpus() -> bool:
    return torch.cuda.is_available() and torch.cuda.device_count() > 1


def device_name(device: torch.device) -> str:
    """The name people know the device by."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    # A virtual machine's "AMD EPYC" may be of any generation.
    family = "" if any(map(str.isdigit, name)) else _cpuinfo("cpu family")
    return f"{name}, family {family}" if family else name


@functools.cache
def has_slow_blas() -> bool:
    """Whether torch's fp32 products on the CPU are Intel's and the processor is not."""
    if not torch.backends.mkl.is_available():
        return False
    return _cpuinfo("vendor_id") not in ("", "GenuineIntel")


@functools.cache
def has_quick_products(dtype: torch.dtype) -> bool:
    """Whether the processor has instructions for products in half precision that torch's library
    takes and the kernels here do not, or may have: they are written for x86.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return dtype in (torch.bfloat16, torch.float16)
    wanted = {torch.bfloat16: ("amx_bf16",), torch.float16: ("amx_fp16", "avx512_fp16")}
    flags = _cpuinfo("flags").split()
    return any(flag in flags for flag in wanted.get(dtype, ()))


def slower_products(dtype: torch.dtype) -> str | None:
    """Why matrix products of the package's C++ kernels are slower than PyTorch's own in this dtype,
    for all that is known of the processor, or None.
    """
    if dtype is torch.float32:
        return None if has_slow_blas() else "is slower here than PyTorch's products in fp32"
    if has_quick_products(dtype):
        return f"lacks this processor's instructions for products in {dtype}, which PyTorch uses"
    return None


def _cpuinfo(name: str) -> str:
    """What the system says of the first processor, "" where it says nothing."""
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == name:
                    return value.strip()
    except OSError:
        pass
    return ""


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def versions() -> dict[str, str]:
    """Versions that belong into every report, "absent" where a package is missing."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found["cuda"] = str(torch.version.cuda or torch.version.hip or "absent")
    for package in ("triton", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found

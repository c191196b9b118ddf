"""Queries of the environment: installed packages, the devices a backend supports, environment
variables.

No other file of the package queries versions, devices or architectures. A check returns the reason
why something cannot be used (phrased to follow "backend triton ...") or None.
"""

import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

import torch

BACKEND_VARIABLE = "FASTATTN_BACKEND"
RECORD_VARIABLE = "FASTATTN_RECORD"
LIBRARY_VARIABLE = "FASTATTN_LIBRARY"
_INTERPRET_VARIABLE = "TRITON_INTERPRET"
CPU = torch.device("cpu")
# A plain dictionary: torch.compile(fullgraph=True) traces no mapping proxy after a mutation of any.
_NO_REQUEST: Mapping[str, str] = {}
# os.environ encodes the key at every lookup, which is most of the 0.5 us that a lookup takes.
_KEYS = {
    name: getattr(os.environ, "encodekey", str)(name)
    for name in (BACKEND_VARIABLE, _INTERPRET_VARIABLE)
}
_BACKEND_KEY = _KEYS[BACKEND_VARIABLE]


def _variable(name: str) -> str | None:
    """os.environ.get(name), faster for a variable that is not set, the usual case."""
    try:
        if _KEYS[name] not in os.environ._data:  # type: ignore[attr-defined]
            return None
    except AttributeError:
        pass  # os.environ was replaced, or this Python implements it in another way
    return os.environ.get(name)


def requested_backends() -> Mapping[str, str]:
    """The backends that FASTATTN_BACKEND requests, by op; the key "" stands for all ops. The value
    of the variable is a name or pairs such as "attention=triton,ffn=cpu".
    """
    try:  # as in _variable, without a call: every call of an op reads this variable
        if _BACKEND_KEY not in os.environ._data:  # type: ignore[attr-defined]
            return _NO_REQUEST
    except AttributeError:
        pass
    value = os.environ.get(BACKEND_VARIABLE)
    return _parse_request(value) if value else _NO_REQUEST


def _parse_request(value: str) -> dict[str, str]:
    request = {}
    for item in value.split(","):
        op, _, name = item.rpartition("=")
        request[op.strip()] = name.strip()
    return request


def record_folder() -> Path | None:
    """The folder of this user's records of verified kernels: FASTATTN_RECORD if it is set (None if
    it is empty), else fastattn/verified in the user's cache folder.
    """
    named = os.environ.get(RECORD_VARIABLE)
    if named is not None:
        return Path(named) if named else None
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # XDG's specification says to ignore relative paths
        cache = os.path.expanduser("~/.cache")
    return Path(cache, "fastattn", "verified")


def library_file(name: str, folder: Path) -> Path:
    """A native library's file: the one in `folder`, or that of the same name which FASTATTN_LIBRARY
    names, such as another build of it; raises ValueError if there is none.
    """
    if not (named := os.environ.get(LIBRARY_VARIABLE)):
        return folder / name
    other = Path(named)
    if not (re.fullmatch(r"_C_(cpu|cuda|sm90)\.abi3\.so", other.name) and other.is_file()):
        wanted = "the file of another build of _C_cpu.abi3.so, _C_cuda.abi3.so or _C_sm90.abi3.so"
        raise ValueError(f"{LIBRARY_VARIABLE} must name {wanted}, got {other}")
    return other if other.name == name else folder / name


def torch_version() -> str:
    return str(torch.__version__)


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter, which takes CPU tensors."""
    return _variable(_INTERPRET_VARIABLE) == "1"


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def why_not_on(backend: str, device: torch.device) -> str | None:
    """Why a backend does not support a device, or None; does not import the backend's module."""
    if backend == "cpu":
        # Reading a device's type takes 0.2 us.
        if device == CPU or device.type == "cpu":
            return None
        return f"runs on cpu tensors, got {device.type}"
    if backend == "triton":
        if device.type != "cuda" and not (device.type == "cpu" and interpreting()):
            return f"runs on cuda tensors, got {device.type}"
        if not has_triton():
            return "needs the triton package, which is not installed"
        return _lacks_shared_memory(device.index or 0) if device.type == "cuda" else None
    if backend in ("sm90", "cuda"):
        if device.type != "cuda":
            return f"runs on cuda tensors, got {device.type}"
        major, minor = capability(device.index or 0)
        is_nvidia = torch.version.hip is None
        if backend == "sm90" and (not is_nvidia or (major, minor) != (9, 0)):
            return f"is built for Hopper (compute capability 9.0), got {major}.{minor}"
        if backend == "cuda" and not is_nvidia:
            return "is built for NVIDIA GPUs, got one of AMD"
        if backend == "cuda" and major < 8:
            return f"is built for compute capability 8.0 and newer, got {major}.{minor}"
    return None


@functools.cache
def capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def architecture(device_type: str, index: int) -> str:
    """The key of configuration tables: sm_90, gfx942, ... or "interpreter"."""
    if device_type != "cuda":
        return "interpreter"
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
    major, minor = capability(index)
    return f"sm_{major}{minor}"


# CUDA reserves this many bytes of a multiprocessor's shared memory for each resident thread block.
RESERVED_SHARED_MEMORY = 1 << 10


@functools.cache
def shared_memory(arch: str) -> int:
    """The bytes of shared memory that Triton configs for an architecture may give to a program:
    what every GPU of the architecture has for a thread block ("Technical Specifications per Compute
    Capability" of the CUDA C++ Programming Guide), and the least of AMD's.
    """
    if not arch.startswith("sm_"):
        return 64 << 10
    if arch in ("sm_80", "sm_87"):
        return 163 << 10
    return (227 if int(arch[3:]) // 10 in (9, 10, 11) else 99) << 10


@functools.cache
def device_shared_memory(index: int) -> int:
    """The bytes of shared memory that a GPU has for a thread block."""
    properties = torch.cuda.get_device_properties(index)
    # On AMD GPUs there is only the second.
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


def _lacks_shared_memory(index: int) -> str | None:
    """Why Triton configs do not fit on a GPU, or None."""
    arch, found = architecture("cuda", index), device_shared_memory(index)
    if found >= (wanted := shared_memory(arch)):
        return None
    return f"needs {wanted >> 10} KB of shared memory per program on {arch}, got {found >> 10} KB"


@functools.cache
def multiprocessors(device_type: str, index: int) -> int:
    """The number of a GPU's multiprocessors; an H200's for any other device."""
    if device_type != "cuda":
        return 132
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def several_gpus() -> bool:
    return torch.cuda.is_available() and gpu_count() > 1


def device_name(device: torch.device) -> str:
    """The product name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = _cpuinfo("model name") or platform.processor() or platform.machine()
    # Virtual machines report names without a model, such as "AMD EPYC".
    family = "" if any(map(str.isdigit, name)) else _cpuinfo("cpu family")
    if family == "6":  # nearly all of Intel's
        return f"{name}, family 6, model {_cpuinfo('model')}"
    return f"{name}, family {family}" if family else name


@functools.cache
def product_limit(dtype: torch.dtype) -> tuple[int, str]:
    """The largest number of rows for which products of fastattn's C++ kernels are chosen in this
    dtype on this processor, and why not for more: PyTorch's are faster.
    """
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return 0, f"is not known to multiply faster than PyTorch on {platform.machine()}"
    units = {torch.bfloat16: "amx_bf16", torch.float16: "amx_fp16"}.get(dtype)
    if units in _cpuinfo("flags").split():
        return 0, f"does not use this processor's matrix instructions ({units}), as PyTorch does"
    # Intel's MKL does not use AVX-512 on other vendors' processors. Without it, MKL is faster:
    # 180 x 64 x 256 takes 77 us on an AMD EPYC of family 25, fastattn's product 113 us.
    has_slow_mkl = (
        torch.backends.mkl.is_available()
        and _cpuinfo("vendor_id") not in ("", "GenuineIntel")
        and "avx512f" in _cpuinfo("flags").split()
    )
    if dtype is torch.float32 and not has_slow_mkl:
        return 32, "multiplies more than 32 rows in fp32 more slowly than PyTorch here"
    return 2**62, ""


def _cpuinfo(name: str) -> str:
    """A field of the first processor in /proc/cpuinfo, "" if there is none."""
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == name:
                    return value.strip()
    except OSError:
        pass
    return ""


def gpu_count() -> int:
    return torch.cuda.device_count()


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def versions() -> dict[str, str]:
    """Versions for reports; "absent" if a package is not installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    found["cuda"] = str(torch.version.cuda or torch.version.hip or "absent")
    for package in ("triton", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found

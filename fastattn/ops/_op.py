"""An op: a torch schema, the layout of its results, and its kernels in PyTorch's dispatcher.

`Op` defines three overloads of `torch.ops.fastattn.<name>`:

- The default overload is the one that eager code, torch.compile, torch.export, functorch, modes and
  subclasses call. The library `_C_cpu` registers its CPU kernel when it is loaded. Until then, and
  for every other device, the kernel is `Op.run`, which selects a backend and launches it. On CUDA
  the extension `_C_autograd` repeats what it launched (csrc/autograd/launch_cache.h).
- `.backend` takes the name of a backend as its last argument and never falls back.
- `.out` writes into given tensors. On the CPU it is the C++ kernel itself. It is meant for eager
  code that repeats recorded steps, and records no derivative.

`outputs` allocates the results of every backend that is launched from Python and of the fake
kernel. `_autograd.py` joins a forward and a backward op into a derivative.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from fastattn.ops import _env, _launch, _select, _vmap
from fastattn.ops._select import CPU_BACKEND, Backend
from fastattn.ops._select import OPS as OPS

try:
    from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode as _TracingMode
except ImportError:  # the module is not public
    _TracingMode = None  # type: ignore[assignment, misc]

LIBRARY = torch.library.Library("fastattn", "DEF")
_Layout = tuple[Sequence[int], Sequence[int], torch.dtype]
_MAX_LAYOUTS = 4096
_is_compiling = torch.compiler.is_compiling


_SCHEMA_TYPES = {
    Tensor: "Tensor",
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    torch.dtype: "ScalarType",
    torch.SymInt: "SymInt",
}


def schema_of(call_type: type[tuple[Any, ...]], results: int) -> str:
    """The arguments of a schema, from the annotations of a NamedTuple's fields. An integer that may
    be symbolic is Annotated[int, torch.SymInt]; Sequence[bool] has an element for each result.
    """
    found = []
    for name, hint in get_type_hints(call_type, include_extras=True).items():
        optional = type(None) in get_args(hint)
        if optional:
            [hint] = set(get_args(hint)) - {type(None)}
        if get_origin(hint) is Sequence:
            kind = f"bool[{results}]"
        else:
            kind = _SCHEMA_TYPES[getattr(hint, "__metadata__", (hint,))[0]]
        found.append(f"{kind}{'?' if optional else ''} {name}")
    return ", ".join(found)


class Op:
    """A torch op `fastattn::<name>` with several backends.

    arguments: as in a schema, or a NamedTuple type whose fields they are (`schema_of`). `outputs`
    and all backends but the reference then take this tuple; the reference always takes the
    arguments one by one.
    results: as in a schema; they are named.
    outputs: (*arguments) -> tuple of empty results; with a NamedTuple, (call) -> the same.
    package: the module path of the op's folder; backend `b` is the module `<package>.b`.
    public_name: the public function that the op belongs to.
    data: the argument (a tensor or a dtype) that has the dtype of the data.
    batched: the arguments and results with a batch whose elements are computed independently, so
    that torch.vmap can fold its dimension into it. The batch is their first dimension, or all
    leading dimensions if batch_is_one_dimension is False.
    broadcast: arguments that have this batch or a batch of 1.
    unfoldable: arguments with which the first dimension is no batch: vmap then calls in a loop.
    dropout: the dropout probabilities; the dropout bits depend on the position in the batch.
    contiguous: tensors whose last dimension Python makes contiguous before it calls a backend.
    is_derivative: whether it computes gradients of another op.
    requestable: whether users can choose its backend.
    other_names: further public functions that the op belongs to, by which users can choose, too.
    requested_in_pairs: FASTATTN_BACKEND applies only if it names the op, as in linear=cpu.
    decomposition: the module of the package with the op in PyTorch's operators, for export.
    """

    def __init__(
        self,
        name: str,
        arguments: str | type[tuple[Any, ...]],
        results: str,
        outputs: Callable[..., tuple[Tensor, ...]],
        package: str,
        backends: Sequence[Backend],
        *,
        public_name: str | None = None,
        data: str | None = None,
        contiguous: Sequence[str] = (),
        batched: Sequence[str] = (),
        batch_is_one_dimension: bool = False,
        broadcast: Sequence[str] = (),
        unfoldable: Sequence[str] = (),
        dropout: Sequence[str] = (),
        is_derivative: bool = False,
        requestable: bool = True,
        other_names: Sequence[str] = (),
        requested_in_pairs: bool = False,
        decomposition: str = "reference",
    ):
        self.name, self.outputs, self.package = name, outputs, package
        self.call_type = None if isinstance(arguments, str) else arguments
        self.public_name = public_name or name
        self.is_derivative, self.requestable = is_derivative, requestable
        self.requested_in_pairs, self._decomposition = requested_in_pairs, decomposition
        self.batched, self.batch_is_one_dimension = frozenset(batched), batch_is_one_dimension
        self.broadcast, self.dropout, self.unfoldable = broadcast, dropout, unfoldable
        self.names = (self.public_name, *other_names)
        self.backends = {backend.name: backend for backend in backends}
        self.orders: dict[tuple[torch.device, torch.dtype], tuple[Backend, ...]] = {}
        self._modules: dict[str, ModuleType] = {}
        self._cached_layouts: dict[tuple[Any, ...], tuple[_Layout, ...]] = {}
        self._launchers: dict[str, Callable[..., tuple[Tensor, ...]]] = {}

        if not isinstance(arguments, str):
            arguments = schema_of(arguments, results.count(",") + 1)
        LIBRARY.define(f"{name}({arguments}) -> ({results})")
        LIBRARY.define(f"{name}.backend({arguments}, str backend) -> ({results})")
        written = ", ".join(
            f"Tensor({chr(ord('a') + i)}!) {result.split()[1]}"
            for i, result in enumerate(results.split(", "))
        )
        LIBRARY.define(f"{name}.out({arguments}, *, {written}) -> ({written})")
        packet = getattr(torch.ops.fastattn, name)
        self.default, self.named, self.out = packet.default, packet.backend, packet.out
        # The default overload as eager code calls it, with the arguments by position.
        self.eager: Callable[..., Any] = self.default
        schema = self.default._schema
        self.arguments = [a.name for a in schema.arguments]
        self.results = [r.name for r in schema.returns]
        types = [str(a.type) for a in schema.arguments]
        self.tensors = [i for i, t in enumerate(types) if t in ("Tensor", "Optional[Tensor]")]
        self.first_tensor = types.index("Tensor")  # its device is the op's device
        self._data = self.first_tensor if data is None else self.arguments.index(data)
        self._contiguous = [self.arguments.index(x) for x in contiguous]

        key = "CompositeExplicitAutograd"
        LIBRARY.impl(name, lambda *args: self.as_declared(self.run(args, None)), key)
        LIBRARY.impl(f"{name}.backend", self._run_named, key)
        LIBRARY.impl(f"{name}.out", self._run_into, key)
        for overload, call, count in (("", self.default, None), (".backend", self.named, -1)):
            qualified = f"fastattn::{name}{overload}"
            torch.library.register_fake(
                qualified, lambda *args, count=count: self._fake(args[:count]), lib=LIBRARY
            )
            torch.library.register_vmap(qualified, _vmap.rule(self, call), lib=LIBRARY)
            if _TracingMode is not None:
                torch.library.register_torch_dispatch(
                    qualified, _TracingMode, self._trace, lib=LIBRARY
                )
        torch.library.register_fake(
            f"fastattn::{name}.out",
            lambda *args, **results: self.as_declared(tuple(results.values())),
            lib=LIBRARY,
        )
        OPS[name] = self

    def __call__(self, *args: Any, backend: str | None = None) -> Any:
        """Calls the op on valid arguments, as the public functions do after their checks, and
        modules whose inputs are known to be valid. Returns what the schema declares.
        """
        return self.overload(backend)(*args)

    def overload(self, backend: str | None) -> Callable[..., Any]:
        """The op as such a call calls it."""
        if backend is not None or _env.requested_backends():
            backend = self.choice(backend)
            if backend is not None:
                return lambda *args: self.named(*args, backend)
        return self.default if _is_compiling() else self.eager

    def choice(self, backend: Any) -> str | None:
        """The backend that the call requests, else the one that FASTATTN_BACKEND requests."""
        if backend is None:
            return _select.requested_backend(self)
        _select.check_known(self, backend)
        return backend  # type: ignore[no-any-return]

    def as_declared(self, results: tuple[Any, ...]) -> Any:
        """The results as PyTorch returns them: a single one not in a tuple."""
        return results[0] if len(self.results) == 1 else results

    def decompositions(self) -> dict[Any, Callable[..., Any]]:
        """{overload: the op in PyTorch's operators}, for programs that run without fastattn."""
        return {
            self.default: lambda *args: self.as_declared(self._decompose(args)),
            self.named: lambda *args: self.as_declared(self._decompose(args[:-1])),
        }

    def _decompose(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        if self.is_derivative:
            raise NotImplementedError(
                f"fastattn::{self.name} computes a derivative and has no decomposition: export a "
                "model that computes none, or call fastattn.unpatch(model) before exporting"
            )
        for name, value in zip(self.arguments, args, strict=True):
            if name.endswith("dropout_p") and value > 0:
                raise NotImplementedError(
                    f"fastattn::{self.name} has no decomposition with dropout, got {name}={value}: "
                    "call model.eval() before exporting"
                )
        function = getattr(self.module(self._decomposition), self.name)
        return function(*args)  # type: ignore[no-any-return]

    def _trace(
        self, mode: Any, call: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Records the call in a graph; in torch.onnx.export, its decomposition."""
        if not _in_onnx_export():
            return mode.__torch_dispatch__(call, types, args, kwargs)
        with mode:
            return self.decompositions()[call](*args)

    def _fake(self, args: Sequence[Any]) -> Any:
        if _TracingMode is None and _in_onnx_export():
            raise NotImplementedError(
                f"torch.onnx.export cannot decompose fastattn::{self.name} with this torch: export "
                "torch.export.export(model, args).run_decompositions(fastattn.decompositions()) "
                "instead of the model, or call fastattn.unpatch(model) first"
            )
        return self.as_declared(self.allocate(args))

    # -- execution ---------------------------------------------------------------------------------
    def run(self, args: Sequence[Any], backend: str | None) -> tuple[Tensor, ...]:
        """Selects a backend, allocates the results and launches the backend."""
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():  # PyTorch's ops in a launcher must not cast
                return self.run(args, backend)
        with torch._C._AutoDispatchBelowADInplaceOrView():  # nor record a graph or views
            contiguous = self._with_contiguous_rows(args)
            call = self.as_call(contiguous)
            run = functools.partial(self._launcher(_select.select(self, call, backend)), call)
            device = args[self.first_tensor].device
            if device.type != "cuda":
                return run()
            _launch.enable(OPS.values())
            if _env.several_gpus():
                with torch.cuda.device(device):
                    return _launch.run_and_record(self.name, backend, args, contiguous, run)
            return _launch.run_and_record(self.name, backend, args, contiguous, run)

    def _run_named(self, *args: Any) -> Any:
        """The kernel of `.backend`; an empty name is that of a call from the CPU library."""
        try:
            return self.as_declared(self.run(args[:-1], args[-1]))
        except Exception as error:
            if not args[-1] and hasattr(torch.ops.fastattn_cpu, "keep_error"):
                # The library throws this text: PyTorch returns to it with a number.
                kind = type(error)
                prefix = "" if kind is RuntimeError else f"{kind.__name__}: "
                torch.ops.fastattn_cpu.keep_error(f"{prefix}{error}")
            raise

    def _run_into(self, *args: Any, **results: Tensor) -> Any:
        """The kernel of `.out` for devices on which no library registers one."""
        for result, value in zip(results.values(), self.run(args, None), strict=True):
            result.copy_(value)
        return self.as_declared(tuple(results.values()))

    def _with_contiguous_rows(self, args: Sequence[Any]) -> Sequence[Any]:
        strided = [
            i
            for i in self._contiguous
            if (x := args[i]) is not None and x.dim() and x.stride(-1) != 1 and x.shape[-1] > 1
        ]
        if not strided:
            return args
        return [x.contiguous() if i in strided else x for i, x in enumerate(args)]

    def as_call(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments as the op's NamedTuple, if it has one."""
        if self.call_type is None or type(args) is self.call_type:
            return args
        return self.call_type._make(args)  # type: ignore[attr-defined, no-any-return]

    def backend_args(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments with which `outputs` and the functions of backends are called: one tuple,
        if the op has a NamedTuple, else `args`.
        """
        return args if self.call_type is None else (self.as_call(args),)

    def allocate(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """Uninitialised results (`testing.poisoned_results` fills them with NaN)."""
        return self.outputs(*self.backend_args(args))

    def allocate_workspace(
        self, buffers: Sequence[tuple[Sequence[int], torch.dtype, bool]], device: torch.device
    ) -> list[Tensor]:
        """A backend's workspace: a tensor for each (shape, dtype, zeroed).
        `testing.poisoned_results` fills those that are not zeroed with NaN.
        """
        return [
            (torch.zeros if zeroed else torch.empty)(shape, dtype=dtype, device=device)
            for shape, dtype, zeroed in buffers
        ]

    def _layouts(self, call: Sequence[Any]) -> tuple[_Layout, ...]:
        """Shapes, strides and dtypes of the results. They are cached because allocating results
        that the backend does not fill costs page faults (for 4 MB, ten times a layer norm).
        """
        key = tuple(
            (x.shape, x.stride(), x.dtype)
            if isinstance(x, Tensor)
            else (tuple(x) if isinstance(x, list) else x)
            for x in call
        )
        layouts = self._cached_layouts.get(key)
        if layouts is None:
            if len(self._cached_layouts) >= _MAX_LAYOUTS:
                self._cached_layouts.clear()
            layouts = tuple((r.shape, r.stride(), r.dtype) for r in self.allocate(call))
            self._cached_layouts[key] = layouts
        return layouts

    # -- backends ----------------------------------------------------------------------------------
    def data_dtype(self, args: Sequence[Any]) -> torch.dtype:
        """The dtype in which a backend must be verified to be chosen automatically."""
        data = args[self._data]
        return data if isinstance(data, torch.dtype) else data.dtype

    def module(self, backend: str) -> ModuleType:
        module = self._modules.get(backend)
        if module is None:
            module = importlib.import_module(f"{self.package}.{backend}")
            self._modules[backend] = module
        return module

    def import_failure(self, backend: str) -> str | None:
        try:
            self.module(backend)
        except ImportError as error:
            return f"cannot be imported: {error}"
        return None

    def _launcher(self, backend: str) -> Callable[..., tuple[Tensor, ...]]:
        launcher = self._launchers.get(backend)
        if launcher is None:
            launcher = self._make_launcher(backend)
            self._launchers[backend] = launcher
        return launcher

    def _make_launcher(self, backend: str) -> Callable[..., tuple[Tensor, ...]]:
        """A function (call) -> results."""
        if backend == CPU_BACKEND:
            overload = f"fastattn::{self.name}.out"
            if not torch._C._dispatch_has_kernel_for_dispatch_key(overload, "CPU"):
                raise RuntimeError(  # `out` would call this function
                    f"the native library cpu must have a kernel of {overload}, got one from other "
                    "sources: build it again (`pip install --no-build-isolation .`)"
                )

            def launch_cpu(call: Sequence[Any]) -> tuple[Tensor, ...]:
                results = self.allocate(call)
                self.out(*call, **dict(zip(self.results, results, strict=True)))
                return results

            return launch_cpu

        module = self.module(backend)
        function: Callable[..., Any] = getattr(module, self.name)
        if backend == "reference" or getattr(module, "RETURNS_RESULTS", False):
            is_reference = backend == "reference"

            def compute(call: Sequence[Any]) -> tuple[Tensor, ...]:
                values = function(*(call if is_reference else self.backend_args(call)))
                device = call[self.first_tensor].device
                layouts = self._layouts(call)
                return tuple(
                    _in_layout(value, *layout, device)
                    for value, layout in zip(values, layouts, strict=True)
                )

            return compute

        describe_workspace = getattr(module, f"{self.name}_workspace", None)

        def launch(call: Sequence[Any]) -> tuple[Tensor, ...]:
            results, args = self.allocate(call), self.backend_args(call)
            buffers = describe_workspace(*args) if describe_workspace else ()
            workspace = (
                self.allocate_workspace(buffers, call[self.first_tensor].device) if buffers else ()
            )
            function(*args, *results, *workspace)
            return results

        return launch


def _in_onnx_export() -> bool:
    onnx = sys.modules.get("torch.onnx")  # importing it takes 0.1 s
    return onnx is not None and onnx.is_in_onnx_export()


def _in_layout(
    value: Tensor | None,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """The backend's result, copied if its layout differs from the op's; an empty tensor for a
    gradient that is not needed (None).
    """
    if value is not None and (value.shape, value.stride(), value.dtype) == (shape, stride, dtype):
        return value
    result = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return result if value is None else result.copy_(value)

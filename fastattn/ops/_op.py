"""An op: a torch schema, what its results look like, and its kernels in torch's dispatcher.

`Op` defines three overloads of `torch.ops.fastattn.<name>`:

- the default one, which everything calls: eager code, torch.compile, torch.export, functorch, modes
  and subclasses. Its kernel under the CPU key is C++ (`_C_cpu`, which registers it when it is
  loaded); everywhere else, and before that, `Op.run` selects a backend and launches it.
- `.backend` takes a backend's name behind the arguments and never falls back.
- `.out` writes into given results: the CPU kernel itself, without a choice. It is for eager code
  that repeats recorded steps, and records no derivative.

`outputs` describes the results once: for every backend that is launched from Python and for the
fake kernel. The derivative, which joins a forward and a backward op, is in `_autograd.py`.
"""

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastattn.ops import _env, _select, _vmap
from fastattn.ops._select import CPU_BACKEND, OPS, Backend

LIBRARY = torch.library.Library("fastattn", "DEF")
_Layout = tuple[Sequence[int], Sequence[int], torch.dtype]
_MOST_LAYOUTS = 4096


class Op:
    """A torch op `fastattn::<name>` whose backend is chosen behind its schema.

    arguments, results: as in a schema; results are named.
    outputs: (*arguments), or (call) of an op with a call_type, -> tuple of empty results.
    package: the module path of the op's folder; backend `b` is the module `<package>.b`.
    call_type: the NamedTuple of the arguments. `outputs` and the backends get it instead of them;
    only the reference gets them one by one.
    family: the public function that the op belongs to.
    data: the argument (a tensor or a dtype) whose dtype is that of the data.
    batched: arguments and results of which entries of a batch are computed alone, for torch.vmap:
    the batch is their first dimension or, unless batch_is_one_dimension, all but the last ones.
    broadcast: arguments with such a batch, or one of 1 for all entries.
    dropped: the probabilities of dropout, whose bits count entries.
    rows: the tensors whose last dimension backends launched from Python find contiguous.
    is_backward: of a derivative. requestable: whether users choose its backend. requested_in_pairs:
    FASTATTN_BACKEND chooses only in a pair with the op's name.
    """

    def __init__(
        self,
        name: str,
        arguments: str,
        results: str,
        outputs: Callable[..., tuple[Tensor, ...]],
        package: str,
        backends: Sequence[Backend],
        call_type: type[tuple[Any, ...]] | None = None,
        *,
        family: str | None = None,
        data: str | None = None,
        rows: Sequence[str] = (),
        batched: Sequence[str] = (),
        batch_is_one_dimension: bool = False,
        broadcast: Sequence[str] = (),
        dropped: Sequence[str] = (),
        is_backward: bool = False,
        requestable: bool = True,
        requested_in_pairs: bool = False,
    ):
        self.name, self.outputs, self.package = name, outputs, package
        self.call_type, self.family = call_type, family or name
        self.is_backward, self.requestable = is_backward, requestable
        self.requested_in_pairs = requested_in_pairs
        self.batched, self.batch_is_one_dimension = frozenset(batched), batch_is_one_dimension
        self.broadcast, self.dropped = broadcast, dropped
        self.backends = {row.name: row for row in backends}
        self.orders: dict[tuple[torch.device, torch.dtype], tuple[Backend, ...]] = {}
        self._modules: dict[str, ModuleType] = {}
        self._known_layouts: dict[tuple[Any, ...], tuple[_Layout, ...]] = {}
        self._launchers: dict[str, Callable[..., tuple[Tensor, ...]]] = {}

        LIBRARY.define(f"{name}({arguments}) -> ({results})")
        LIBRARY.define(f"{name}.backend({arguments}, str backend) -> ({results})")
        written = ", ".join(
            f"Tensor({chr(ord('a') + i)}!) {result.split()[1]}"
            for i, result in enumerate(results.split(", "))
        )
        LIBRARY.define(f"{name}.out({arguments}, *, {written}) -> ({written})")
        packet = getattr(torch.ops.fastattn, name)
        self.default, self.named, self.out = packet.default, packet.backend, packet.out
        schema = self.default._schema
        self.arguments = [a.name for a in schema.arguments]
        self.results = [r.name for r in schema.returns]
        assert call_type is None or [*getattr(call_type, "_fields", ())] == self.arguments
        types = [str(a.type) for a in schema.arguments]
        self.tensors = [i for i, t in enumerate(types) if t in ("Tensor", "Optional[Tensor]")]
        self.anchor = types.index("Tensor")  # its device is the op's device
        self._data = self.anchor if data is None else self.arguments.index(data)
        self._rows = [self.arguments.index(x) for x in rows]

        key = "CompositeExplicitAutograd"
        LIBRARY.impl(name, lambda *args: self.as_declared(self.run(args, None)), key)
        LIBRARY.impl(
            f"{name}.backend",
            lambda *args: self.as_declared(self.run(args[:-1], args[-1])),
            key,
        )
        LIBRARY.impl(f"{name}.out", self._run_into, key)
        for overload, count in (("", None), (".backend", -1)):
            torch.library.register_fake(
                f"fastattn::{name}{overload}",
                lambda *args, count=count: self.as_declared(self.allocate(args[:count])),
                lib=LIBRARY,
            )
        for overload, call in (("", self.default), (".backend", self.named)):
            batching = _vmap.rule(self, call)
            torch.library.register_vmap(f"fastattn::{name}{overload}", batching, lib=LIBRARY)
        torch.library.register_fake(
            f"fastattn::{name}.out",
            lambda *args, **results: self.as_declared(tuple(results.values())),
            lib=LIBRARY,
        )
        OPS[name] = self

    def __call__(self, *args: Any, backend: str | None = None) -> Any:
        """The public functions' call, with the results that the schema declares."""
        if backend is None:
            return self.default(*args)
        return self.named(*args, backend)

    def choice(self, backend: Any) -> str | None:
        """The backend that a call names, or the environment for it."""
        if backend is None:
            return _select.requested_backend(self)
        _select.check_known(self, backend)
        return backend  # type: ignore[no-any-return]

    def as_declared(self, results: tuple[Any, ...]) -> Any:
        """As torch returns them: a single result bare."""
        return results[0] if len(self.results) == 1 else results

    # -- execution ---------------------------------------------------------------------------------
    def run(self, args: Sequence[Any], backend: str | None) -> tuple[Tensor, ...]:
        """Select, allocate, launch."""
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():  # torch ops inside a launcher change no dtypes
                return self.run(args, backend)
        with torch._C._AutoDispatchBelowADInplaceOrView():  # and record no graph and no views
            call = self.as_call(self._with_rows(args))
            launch = self._launcher(_select.select(self, call, backend))
            device = args[self.anchor].device
            if device.type == "cuda" and _env.several_gpus():
                with torch.cuda.device(device):
                    return launch(call)
            return launch(call)

    def _run_into(self, *args: Any, **results: Tensor) -> Any:
        """`.out` where it has no kernel of its own."""
        for result, value in zip(results.values(), self.run(args, None), strict=True):
            result.copy_(value)
        return self.as_declared(tuple(results.values()))

    def _with_rows(self, args: Sequence[Any]) -> Sequence[Any]:
        scattered = [
            i
            for i in self._rows
            if (x := args[i]) is not None and x.dim() and x.stride(-1) != 1 and x.shape[-1] > 1
        ]
        if not scattered:
            return args
        return [x.contiguous() if i in scattered else x for i, x in enumerate(args)]

    def as_call(self, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments in their NamedTuple, if the op has one."""
        if self.call_type is None or type(args) is self.call_type:
            return args
        return self.call_type._make(args)  # type: ignore[attr-defined, no-any-return]

    def given(self, args: Sequence[Any]) -> Sequence[Any]:
        """What `outputs` and the functions of backends are called with."""
        return args if self.call_type is None else (self.as_call(args),)

    def allocate(self, args: Sequence[Any]) -> tuple[Tensor, ...]:
        """The results before anything is written (`testing.poisoned_results` puts NaN there)."""
        return self.outputs(*self.given(args))

    def allocate_workspace(
        self, pieces: Sequence[tuple[Sequence[int], torch.dtype, bool]], device: torch.device
    ) -> list[Tensor]:
        """A backend's scratch memory (`testing.poisoned_results` puts NaN where zeros are not asked
        for).
        """
        return [
            (torch.zeros if zeroed else torch.empty)(shape, dtype=dtype, device=device)
            for shape, dtype, zeroed in pieces
        ]

    def _layouts(self, call: Sequence[Any]) -> tuple[_Layout, ...]:
        """Shapes, strides and dtypes of the results. Remembered: to allocate them beside those that
        a backend makes costs page faults (of 4 MB, ten times the time of a layer norm).
        """
        key = tuple(
            (x.shape, x.stride(), x.dtype)
            if isinstance(x, Tensor)
            else (tuple(x) if isinstance(x, list) else x)
            for x in call
        )
        layouts = self._known_layouts.get(key)
        if layouts is None:
            if len(self._known_layouts) >= _MOST_LAYOUTS:
                self._known_layouts.clear()
            layouts = tuple((r.shape, r.stride(), r.dtype) for r in self.allocate(call))
            self._known_layouts[key] = layouts
        return layouts

    # -- backends ----------------------------------------------------------------------------------
    def data_dtype(self, args: Sequence[Any]) -> torch.dtype:
        """That of the verdicts on backends which a call goes by, forward and backward alike."""
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
        """The call -> its results."""
        if backend == CPU_BACKEND:

            def launch_cpu(call: Sequence[Any]) -> tuple[Tensor, ...]:
                results = self.allocate(call)
                self.out(*call, **dict(zip(self.results, results, strict=True)))
                return results

            return launch_cpu

        module = self.module(backend)
        function: Callable[..., Any] = getattr(module, self.name)
        if backend == "reference" or getattr(module, "RETURNS_RESULTS", False):
            # The reference is written to be believed: it takes its arguments one by one.
            one_by_one = backend == "reference"

            def compute(call: Sequence[Any]) -> tuple[Tensor, ...]:
                values = function(*(call if one_by_one else self.given(call)))
                device = call[self.anchor].device
                layouts = self._layouts(call)
                return tuple(
                    _in_layout(value, *layout, device)
                    for value, layout in zip(values, layouts, strict=True)
                )

            return compute

        workspace = getattr(module, f"{self.name}_workspace", None)

        def launch(call: Sequence[Any]) -> tuple[Tensor, ...]:
            results, given = self.allocate(call), self.given(call)
            pieces = workspace(*given) if workspace else ()
            scratch = self.allocate_workspace(pieces, call[self.anchor].device) if pieces else ()
            function(*given, *results, *scratch)
            return results

        return launch


def _in_layout(
    value: Tensor | None,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """A backend's own result, copied where it lies otherwise than the op's; of a gradient that is
    not wanted, that empty result.
    """
    if value is not None and (value.shape, value.stride(), value.dtype) == (shape, stride, dtype):
        return value
    result = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    return result if value is None else result.copy_(value)

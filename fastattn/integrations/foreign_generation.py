"""`generate` of encoder-decoders of `transformers`, on a static cache and recorded steps.

`patch` gives a model whose `model_type` is in MODEL_TYPES a subclass of its class. `generate` stays
that of `transformers`, with all its options; the subclass replaces what it calls for one token: the
prompt runs the model's own `forward` and fills a `BeamCache`, the first step after it is recorded,
later ones are replays. A recorded step is kept for later calls of the same sizes. It reads the
parameters where they are, so training in between is seen; a model whose parameters have moved, or
whose modules or their attributes have changed, is recorded again.

A call with an option that this does not cover runs the model's own path; the reason is counted in
`PatchReport.generate`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from fastattn.integrations.huggingface import NAMES
from fastattn.nn.fusion import linear, modules_of
from fastattn.nn.step_graph import Tape, recorded

if TYPE_CHECKING:
    from fastattn.integrations.beam_cache import BeamCache

# Decoders whose cross-attention reads the memory only through the cache once it is filled.
MODEL_TYPES = ("bart", "m2m_100", "marian", "mbart", "mt5", "pegasus", "t5", "whisper")
STATE = "_fastattn_generation"  # in the __dict__ of a converted model

# Sizes are rounded up to multiples of these, so that similar calls share one recorded step.
_MEMORY_SIZES = 16
_POSITIONS = 32  # and doubled when they are used up
_KEPT = 8  # programs of a model
_OLDEST = (5, 17)  # the first `transformers` whose generate marks a cache of the caller
_ARGUMENTS = {"encoder_outputs", "attention_mask", "use_cache"}  # and the cache


def _cache_name(model: Any) -> str:
    """The model's name for the cache in its arguments and results; transformers 5.24 renamed it."""
    kind: Any = type(model)
    return _cache_name_of(kind)


@functools.cache
def _cache_name_of(kind: Any) -> str:
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


# -- recorded steps -------------------------------------------------------------------------------
class _Products(TorchFunctionMode):
    """Linear layers by fastattn's products where they are faster."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (linear if func is F.linear else func)(*args, **(kwargs or {}))


class _Program:
    """A decoder step of fixed sizes: its cache, its input and output, and its replay."""

    def __init__(self, forward: Callable[..., Any], cache: BeamCache, memory: Tensor) -> None:
        self._forward = forward
        self.cache = cache
        rows, device = cache.batch * cache.beams, memory.device
        self.tokens = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.logits: Tensor | None = None  # [B * K, 1, V]
        # A decoder reads no memory once the cache is filled, and makes no mask if it gets one.
        self._memory = memory.new_zeros(1, 1, 1).expand(cache.batch, 1, memory.shape[-1])
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        self.is_recorded = True
        self.has_changed = False  # the model, in a step
        self._replay: Callable[[], None] | None = None
        self._is_cache_released = self._is_step_released = False

    def prompt(self, model: Any, tokens: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        """Logits `[B, P, V]` of tokens `[B, P]`; memory: `[B, N, E]`, mask: `[B, N]`."""
        B, N = memory.shape[:2]
        allowed = torch.ones(B, N, dtype=torch.bool, device=memory.device)
        self.cache.start(allowed if mask is None else mask.bool())
        with _Products():
            logits = self._call(model, tokens, memory, mask, None)
        self.cache.end_of_prompt(tokens.shape[1])
        return logits

    def step(self, model: Any, tokens: Tensor, is_unchanged: Callable[[], bool]) -> Tensor:
        """Logits `[B * K, 1, V]` after one more token of each row. A step that changes the model is
        not kept: the program stays new.
        """
        if self._is_step_released:
            assert isinstance(self._replay, Tape)
            self._replay.allocate()
            self._is_step_released = False
        self.tokens.copy_(tokens)
        state = self.cache.state
        length = state.length
        run = functools.partial(self._run, model)
        if self._replay is None and self.is_recorded:
            self._replay = recorded(
                run,
                functools.partial(state.seek, state.position.clone()),
                tokens.device,
                # Modules may have kept any of the step's tensors.
                results=lambda: [self.logits] if is_unchanged() else None,  # type: ignore[list-item]
                weights=model.parameters(),
            )
            self._replay()
            if not is_unchanged():
                self._replay = None
        else:
            (self._replay or run)()
        state.length = length + 1
        assert self.logits is not None
        return self.logits

    @property
    def is_new(self) -> bool:
        return self._replay is None

    def release(self) -> None:
        """Frees the memory until the next call, except on a GPU, where a graph holds addresses."""
        if isinstance(self._replay, Tape):
            self._replay.release()
            self.cache.release()
            self._is_cache_released = self._is_step_released = True

    def allocate(self) -> None:
        """Allocates the cache; what the step computes is allocated after the prompt."""
        if self._is_cache_released:
            self.cache.allocate()
            self._is_cache_released = False

    def _run(self, model: Any) -> None:
        with _Products():
            self.logits = self._call(model, self.tokens, self._memory, self._mask, self._mask)
        self.cache.end_of_step()

    def _call(
        self, model: Any, tokens: Tensor, memory: Tensor, mask: Any, decoder_mask: Any
    ) -> Tensor:
        from transformers.modeling_outputs import BaseModelOutput

        given: dict[str, Any] = {} if mask is None else {"attention_mask": mask}
        given[_cache_name(model)] = self.cache
        if decoder_mask is not None:
            given["decoder_attention_mask"] = decoder_mask
        return self._forward(  # type: ignore[no-any-return]
            model, decoder_input_ids=tokens, encoder_outputs=BaseModelOutput(memory),
            use_cache=True, return_dict=True, **given,
        ).logits  # fmt: skip


# -- one call of generate -------------------------------------------------------------------------
@dataclass
class State:
    """The state of a converted model between calls; copies and pickles of the model start anew."""

    fallbacks: dict[str, int] = field(default_factory=dict)  # reason -> calls
    programs: OrderedDict[Hashable, _Program] = field(default_factory=OrderedDict)
    fingerprint: Hashable = None  # of the model that `programs` were recorded of

    def programs_of(self, fingerprint: Hashable) -> OrderedDict[Hashable, _Program]:
        if fingerprint != self.fingerprint:
            self.fingerprint, self.programs = fingerprint, OrderedDict()
        return self.programs

    def __deepcopy__(self, memo: Any) -> State:
        return State()

    def __reduce__(self) -> tuple[Any, ...]:
        return State, ()

    def count_fallback(self, why: str) -> None:
        self.fallbacks[why] = self.fallbacks.get(why, 0) + 1


class _Generation:
    """The object that `generate` uses as its cache, and the model calls."""

    is_compileable = False
    is_linear = (False,)

    def __init__(
        self, forward: Callable[..., Any], model: Any, fingerprint: Hashable, beams: int
    ) -> None:
        self._forward, self._model, self._beams = forward, model, beams
        self._fingerprint = fingerprint
        self._state: State = model.__dict__[STATE]
        self._programs = self._state.programs_of(fingerprint)
        self._program: _Program | None = None
        self._key: tuple[Hashable, ...] = ()
        self._memory_rows = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self._program is None else self._program.cache.state.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        assert self._program is not None
        self._program.cache.reorder_cache(beam_idx)

    def forward(self, decoder_input_ids: Tensor, encoder_outputs: Any, attention_mask: Any) -> Any:
        from transformers.modeling_outputs import Seq2SeqLMOutput

        if self._program is None:
            logits = self._prompt(decoder_input_ids, encoder_outputs[0], attention_mask)
        else:
            if self._program.cache.state.length == self._program.cache.max_length:
                self._grow(self._program, encoder_outputs[0])
            logits = self._step(self._program, decoder_input_ids)
        cache: Any = {_cache_name(self._model): self}
        return Seq2SeqLMOutput(logits=logits, **cache)

    def _prompt(self, tokens: Tensor, memory: Tensor, mask: Tensor | None) -> Tensor:
        K = self._beams
        tokens, memory = tokens[::K], memory[::K]  # the rows of a sentence are equal
        if self._model.config.model_type == "whisper":  # whose decoder attends to all of the memory
            mask = None
        mask = None if mask is None else mask[::K]
        B, self._memory_rows = memory.shape[:2]
        # Lengths are faster than a mask.
        is_padded = mask is not None and bool((mask[:, 1:] > mask[:, :-1]).any())
        size = _round_up(self._memory_rows, _MEMORY_SIZES)
        self._key = (B, K, size, is_padded, torch.is_inference_mode_enabled())
        capacity = _POSITIONS
        while capacity < tokens.shape[1]:
            capacity *= 2
        program = self._program = self._take(capacity, memory)
        logits = program.prompt(self._model, tokens, memory, mask)
        if program.is_new and not self._is_unchanged():
            program.is_recorded = False
            self._count_change()
        return logits.repeat_interleave(K, 0) if K > 1 else logits

    def _step(self, program: _Program, tokens: Tensor) -> Tensor:
        logits = program.step(self._model, tokens, self._is_unchanged)
        if program.is_recorded and program.is_new:
            # Once is the growth of a table of positions.
            if program.has_changed:
                program.is_recorded = False
                self._count_change()
            program.has_changed, self._fingerprint = True, _survey(self._model).fingerprint
        return logits

    def _is_unchanged(self) -> bool:
        """A replay would not change attributes, and would overwrite tensors that modules keep."""
        return _survey(self._model).fingerprint == self._fingerprint

    def _count_change(self) -> None:
        self._state.count_fallback("is of a model whose forward changes modules' attributes")

    def _take(self, capacity: int, memory: Tensor) -> _Program:
        """A program that no other call uses, kept or new."""
        program = self._programs.pop((capacity, *self._key), None)
        if program is None:
            from fastattn.integrations.beam_cache import BeamCache

            batch, beams, size, is_padded, _ = self._key
            cache = BeamCache(batch, beams, capacity, size, is_padded, memory.device)  # type: ignore[arg-type]
            program = _Program(self._forward, cache, memory)
        program.allocate()
        return program

    def _grow(self, program: _Program, memory: Tensor) -> None:
        self._program = self._take(2 * program.cache.max_length, memory)
        self._program.is_recorded = program.is_recorded
        program.cache.copy_to(self._program.cache)
        self._put(program)

    def _put(self, program: _Program) -> None:
        if not program.is_recorded or program.is_new:  # there is no step to keep
            return
        program.release()
        key = (program.cache.max_length, *self._key)
        self._programs[key] = program
        self._programs.move_to_end(key)
        while len(self._programs) > _KEPT:
            self._programs.popitem(last=False)

    def end(self) -> None:
        if self._program is not None:
            self._put(self._program)

    def as_dynamic(self) -> Any:
        assert self._program is not None
        return self._program.cache.as_dynamic(self._memory_rows)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class _Survey:
    """The dependencies of a recorded step: the addresses and strides of parameters and buffers, the
    modules, their classes and attributes, such as the scale of an adapter or whether it is active,
    and the values of the model's configuration.

    why: why the step of a model in this state is not recorded.
    """

    fingerprint: tuple[Hashable, ...]
    why: str | None


def _survey(model: Any) -> _Survey:
    found = [_setting(vars(model.config))]
    devices, why = set(), None
    if torch.nn.modules.module._has_any_global_hook():
        why = "is made while hooks of all modules are registered"
    for module in modules_of(model):
        kind: Any = type(module)
        state = module.__dict__
        found += [kind, kind.forward, *map(id, state["_modules"].values())]
        for name, value in state.items():
            if name not in _NOT_SETTINGS:
                found += [name, _setting(value)]
        parameters, buffers = state["_parameters"].values(), state["_buffers"].values()
        # Steps read parameters in place; those that were replaced are not kept.
        found += [_place(p) if type(p) in _PLAIN else _setting(p) for p in parameters]
        found += map(_setting, buffers)
        for tensor in (*parameters, *buffers):
            if tensor is not None:
                devices.add(tensor.device)
                if type(tensor) not in _PLAIN:
                    why = f"is of a model with a {type(tensor).__name__}, as of a {kind.__name__}"
        hooks = (*state["_forward_hooks"].values(), *state["_forward_pre_hooks"].values())
        config = state.get("config")
        if any(_is_noticed(hook) for hook in hooks):
            why = f"is of a model with hooks, as of a {kind.__name__}"
        elif state.get("_compiled_call_impl") is not None:
            why = f"is of a compiled model, as of a {kind.__name__}"
        elif parametrize.is_parametrized(module):
            why = f"is of a model with parametrizations, as of a {kind.__name__}"
        elif "forward" in state:
            why = f"is of a model with its own forward, as of a {kind.__name__}"
        elif state["training"] and _drops(state):
            why = f"is of a model with dropout in training mode, as of a {kind.__name__}"
        elif (attention := getattr(config, "_attn_implementation", NAMES[0])) not in NAMES:
            why = f"is of a model with attn_implementation={attention!r}"
    if len(devices) != 1:
        why = "is of a model on several devices"
    return _Survey(tuple(found), why)


# Entries of a module's __dict__ that `_survey` reads separately, or that forward does not read.
_NOT_SETTINGS = {*nn.Module().__dict__, STATE} - {"training"}
_PLAIN = (Tensor, nn.Parameter)  # not subclasses, such as quantised weights, without an address


def _drops(state: dict[str, Any]) -> bool:
    """Whether a module in training mode drops values or layers, which one row of a sentence would
    do otherwise than its beams.
    """
    rates = [value for name, value in state.items() if name == "p" or "drop" in name]
    return any(isinstance(rate, int | float) and rate > 0 for rate in rates)


class _Same:
    """Compares an object by identity, or a tensor by its place. It is kept, so that no other gets
    its address: a tensor without its graph.
    """

    def __init__(self, value: Any) -> None:
        is_tensor = type(value) in _PLAIN
        self.value = value.detach() if is_tensor else value
        self.key: Hashable = _place(value) if is_tensor else id(value)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Same) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def _place(tensor: Tensor) -> Hashable:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _setting(value: Any) -> Hashable:
    """A hashable value that differs if an attribute or buffer has changed."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return tuple((_setting(key), _setting(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_setting, value))
    return _Same(value)


def _why_own_path(model: Any, config: Any, rows: int, given: dict[str, Any]) -> str | None:
    """Why a call of `generate` runs the model's own path, phrased to follow "the call"."""
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    cache_name = _cache_name(model)
    cache = given.get(cache_name)
    if model.training:
        return "is in training mode"
    if torch.is_grad_enabled():
        return "records gradients"
    if torch._C._is_any_autocast_enabled():
        return "is under autocast"
    if getattr(config, "is_assistant", False):
        return "is that of an assistant"
    if not config.use_cache or cache is None:
        return "has use_cache=False"
    if getattr(cache, "_is_user_defined", False):
        return f"has {cache_name}"
    own = getattr(cache, "self_attention_cache", None)
    if type(cache) is not EncoderDecoderCache or type(own) is not DynamicCache or own.offloading:
        return f"has cache_implementation={config.cache_implementation!r}"
    for name in ("output_attentions", "output_hidden_states"):
        if any(getattr(c, name, False) for c in (config, model.config)) or given.get(name):
            return f"has {name}"
    if getattr(config, "prefill_chunk_size", None) is not None:
        return "has prefill_chunk_size"
    mask = given.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        return f"has an attention_mask of {mask.dim()} dimensions"
    if given["encoder_outputs"][0].shape[0] != rows:
        return "has a batch of encoder_outputs that is not that of its tokens"
    for name, value in given.items():
        if name not in {*_ARGUMENTS, cache_name} and value is not None and value is not False:
            return f"has {name}"
    if getattr(model, "hf_quantizer", None) is not None:
        return "is of a quantised model"
    return None


def _is_noticed(hook: Any) -> bool:
    """Not those of `transformers` that record attentions when these are requested."""
    return bool(getattr(hook, "__module__", "") != "transformers.utils.output_capturing")


# -- the drop-in ----------------------------------------------------------------------------------
def why_unsupported(model: Any) -> str | None:
    """Why `generate` of this encoder-decoder stays as it is, phrased to follow its name."""
    import transformers

    kind = type(model)
    version = transformers.__version__
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        wanted = ".".join(map(str, _OLDEST))
        return f"keeps its generate: fastattn needs transformers >= {wanted}, got {version}"
    if model.config.model_type not in MODEL_TYPES:
        return f"keeps its generate: fastattn has none for model_type {model.config.model_type}"
    if not kind.__module__.startswith("transformers.models."):
        return f"keeps its generate: {kind.__name__} is a class of another package"
    if "forward" in model.__dict__:
        return "keeps its generate: it has its own forward"
    return None


@functools.cache
def drop_in(kind: Any) -> type[nn.Module]:
    cache_name = _cache_name_of(kind)

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        generation = kwargs.get(cache_name)
        if type(generation) is not _Generation:
            return kind.forward(self, *args, **kwargs)
        ids, outputs = kwargs["decoder_input_ids"], kwargs["encoder_outputs"]
        return generation.forward(ids, outputs, kwargs.get("attention_mask"))

    def searching(search: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(search)
        def run(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
            if "generation_config" not in kwargs:  # not called by generate
                return search(self, input_ids, *args, **kwargs)
            with _generation(kind.forward, self, input_ids, kwargs) as generation:
                result = search(self, input_ids, *args, **kwargs)
                if generation is not None and not isinstance(result, Tensor):
                    setattr(result, cache_name, generation.as_dynamic())
            return result

        return run

    @functools.wraps(kind._assisted_decoding)
    def assisted(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.__dict__[STATE].count_fallback("runs assisted decoding")
        return kind._assisted_decoding(self, *args, **kwargs)

    def encoding(encode: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(encode)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            with contextlib.nullcontext() if torch.is_grad_enabled() else _Products():
                return encode(self, *args, **kwargs)

        return run

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        _, _, *state = super(made, self).__reduce_ex__(protocol)
        return _rebuild, (kind,), *state

    methods = {
        "forward": forward, "__reduce_ex__": reduce, "_assisted_decoding": assisted
    }  # fmt: skip
    methods |= {name: searching(getattr(kind, name)) for name in ("_sample", "_beam_search")}
    encode = "_maybe_prepare_encoder_kwargs_for_generation"
    if hasattr(kind, encode):  # in transformers 5.23; else the encoder runs as it is
        methods[encode] = encoding(getattr(kind, encode))
    names = {"__doc__": kind.__doc__, "__module__": kind.__module__, "replaces": kind}
    made: type[nn.Module] = type(kind.__name__, (kind,), names | methods)
    return made


def _rebuild(kind: Any) -> Any:
    made = drop_in(kind)
    return made.__new__(made)


@contextlib.contextmanager
def _generation(
    forward: Callable[..., Any], model: Any, input_ids: Tensor, given: dict[str, Any]
) -> Iterator[_Generation | None]:
    """Replaces the cache in the arguments of a search, if the call is covered."""
    config = given["generation_config"]
    options = ("logits_processor", "stopping_criteria", "generation_config", "synced_gpus",
               "streamer", "tokenizer", "assistant_model")  # fmt: skip
    arguments = {name: value for name, value in given.items() if name not in options}
    beams = max(config.num_beams, config.num_return_sequences)
    survey = _survey(model)
    why = _why_own_path(model, config, len(input_ids), arguments) or survey.why
    if why is None and given.get("synced_gpus"):
        why = "has synced_gpus"
    if why is None and input_ids.shape[0] % beams:
        why = "has another number of rows than beams"
    if why is None and bool((input_ids.unflatten(0, (-1, beams)).diff(dim=1) != 0).any()):
        why = "has rows of one sentence that differ"
    state = model.__dict__[STATE]
    if why is not None:
        state.count_fallback(why)
        yield None
        return
    generation = _Generation(forward, model, survey.fingerprint, beams)
    given[_cache_name(model)] = generation
    try:
        yield generation
    finally:
        generation.end()

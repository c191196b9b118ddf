"""Inputs for any model of `transformers`, by the arguments of its `forward`; and their variants:
padding on both sides, a mask without padding, another last token, other tokens in the padding.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

BATCH, LENGTH, TARGET = 3, 13, 7
_OTHER_TOKEN = 105
Inputs = dict[str, Any]
Results = list[tuple[str, Tensor]]
Masks = tuple[Tensor, ...]  # [B, N] each, 0 = does not count; each is for results of its length
_PARTS = ("vision_config", "audio_config", "encoder_config", "text_config", "speech_config",
          "backbone_config", "encoder", "thinker_config", "image_config")  # fmt: skip
_BANDS = ("num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "mel_bins",
          "input_dim")  # fmt: skip
_HIDDEN = ("x", "hidden_state", "hidden_states", "inputs_embeds", "query_embeds",
           "encoder_hidden_states")  # fmt: skip
_NOT_RESULTS = ("past_key_values", "cache", "attentions", "cross_attentions", "loss")


@dataclass(frozen=True)
class Variant:
    """inputs: of `forward`. valid: the positions whose results count. probed: the label of a
    variant that differs only in tokens that must not reach the results at `unaffected`.
    """

    label: str
    inputs: Inputs
    valid: Masks = ()
    probed: str | None = None
    unaffected: Masks = ()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def tokens(seed: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randint(10, 100, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def candidates(model: nn.Module) -> Iterator[tuple[str, Inputs]]:
    """(kind, inputs): several of a kind, of which the model may accept one."""
    takes, config = inspect.signature(model.forward).parameters, model.config
    others = (*_images(takes, config), *_audio(takes, config), *_series(takes, config))
    text = {"input_ids": tokens()} if "input_ids" in takes else {}
    found = [("text", text), *others] if text else list(others)
    for kind, inputs in found or [("other", _hidden(takes, config))]:
        for more in ({}, text) if kind in ("images", "audio") and text else ({},):
            given = inputs | more
            if "bbox" in takes:
                given["bbox"] = torch.tensor([1, 2, 30, 40]).repeat(BATCH, LENGTH, 1)
            if "decoder_input_ids" in takes:
                given["decoder_input_ids"] = tokens(3, TARGET)
            if "input_features_mask" in takes and "input_features" in given:
                frames = max(given["input_features"].shape[1:])
                given["input_features_mask"] = torch.ones(BATCH, frames, dtype=torch.long)
            yield "text and images" if more and kind == "images" else kind, given
    if text and "pixel_values" in takes and hasattr(model, "get_image_features"):
        yield from _image_tokens(model, takes)


def _value(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields that the config or one of its parts has."""
    parts = (getattr(config, part, None) for part in _PARTS)
    for owner in [config, *(part for part in parts if part is not None)]:
        for name in names:
            found = getattr(owner, name, None)
            if found is not None and not isinstance(found, dict):
                return found
    return default


def _images(takes: Any, config: Any) -> Iterator[tuple[str, Inputs]]:
    side = _value(config, "image_size", "img_size", "input_size", default=64)
    height, width = side[-2:] if isinstance(side, list | tuple) else (side, side)
    channels = _value(config, "num_channels", "in_channels", "in_chans")
    shape = (channels if isinstance(channels, int) else 3, height, width)
    frames = _value(config, "num_frames", default=2)
    if "grid_thw" in takes:
        patches, grid = _patches(config, 2)
        name = "hidden_states" if "hidden_states" in takes else "pixel_values"
        yield "patches", {name: patches, "grid_thw": grid}
    if "pixel_values" in takes:
        yield "images", {"pixel_values": normal(BATCH, *shape)}
        yield "images", {"pixel_values": normal(BATCH, frames, *shape)}
    if "pixel_values_videos" in takes:
        yield "video", {"pixel_values_videos": normal(BATCH, frames, *shape)}


def _patches(config: Any, images: int) -> tuple[Tensor, Tensor]:
    """Flattened patches of images, and the grid of each (Qwen2-VL)."""
    merge = _value(config, "spatial_merge_size", default=1)
    channels = _value(config, "in_channels", "num_channels", "in_chans", default=3)
    frames = _value(config, "temporal_patch_size", default=1)
    side = _value(config, "patch_size", default=14)
    area = side**2 if isinstance(side, int) else side[0] * side[1]
    grid = torch.tensor([[1, 2 * merge, 2 * merge]] * images)
    return normal(images * 4 * merge * merge, channels * frames * area), grid


def _audio(takes: Any, config: Any) -> Iterator[tuple[str, Inputs]]:
    bands = _value(config, *_BANDS, default=80)
    longest = _value(config, "max_source_positions", "max_position_embeddings", default=32)
    lengths = dict.fromkeys((2 * int(longest), 64, 100))
    shapes: dict[str, list[tuple[int, ...]]] = {
        "input_values": [(4000,), (1, 4000), (_value(config, "max_length", default=64), bands)],
        "input_features": [shape for n in lengths for shape in ((bands, n), (n, bands))],
        "audio_values": [(1, 4000)],
    }
    shapes["input_features"].append((1, _value(config, "spec_size", default=64), bands))
    for name in shapes.keys() & takes.keys():
        yield from (("audio", {name: normal(BATCH, *shape)}) for shape in shapes[name])


def _series(takes: Any, config: Any) -> Iterator[tuple[str, Inputs]]:
    if "past_values" not in takes:
        return
    context = _value(config, "context_length", default=32)
    length = context + max(_value(config, "lags_sequence", default=[0]) or [0])
    channels = _value(config, "num_input_channels", "input_size", default=1)
    features = _value(config, "num_time_features", default=0)
    ahead = _value(config, "prediction_length", default=4)
    past = normal(BATCH, length, channels)
    if "past_time_features" in takes:
        past = past.squeeze(2)
        yield (
            "series",
            {
                "past_values": past,
                "past_time_features": normal(BATCH, length, features),
                "past_observed_mask": torch.ones_like(past),
                "future_values": normal(BATCH, ahead),
                "future_time_features": normal(BATCH, ahead, features),
            },
        )
    yield "series", {"past_values": past}
    yield "series", {"past_values": normal(BATCH, context)}
    yield "series", {"past_values": [normal(context)] * BATCH}


def _hidden(takes: Any, config: Any) -> Inputs:
    """Hidden states, and trajectories, for models that take nothing else."""
    width = _value(config, "hidden_size", "d_model", "embed_dim", default=64)
    sizes = dict.fromkeys(_HIDDEN, width) | {"states": 17, "actions": 4}
    sizes |= {"rewards": 1, "returns_to_go": 1}
    made = {name: normal(BATCH, LENGTH, size) for name, size in sizes.items()}
    made["timesteps"] = torch.arange(LENGTH).repeat(BATCH, 1)
    return {name: x for name, x in made.items() if name in takes}


def _image_tokens(model: Any, takes: Any) -> Iterator[tuple[str, Inputs]]:
    """Text with the features of an image at its image tokens."""
    config = model.config
    if (token := _value(config, "image_token_id", "image_token_index")) is None:
        return
    images = [{"pixel_values": x} for _, x in _images({"pixel_values"}, config) for x in x.values()]
    side = images[0]["pixel_values"].shape[-1]
    patches, grid = _patches(config, BATCH)
    images.insert(0, {"pixel_values": patches, "image_grid_thw": grid})
    images.append(images[1] | {"image_sizes": torch.tensor([[side, side]] * BATCH)})
    images.append({"pixel_values": images[1]["pixel_values"][:, None]})
    for given in images:
        try:
            with torch.no_grad():
                features = model.get_image_features(**given)
            features = getattr(features, "pooler_output", features)
            parts = features if isinstance(features, list | tuple) else [features]
            count = sum(part.numel() // part.shape[-1] for part in parts) // BATCH
        except Exception:  # it encodes images of another form
            continue
        ids = torch.cat([tokens(3, 2), torch.full((BATCH, count), token), tokens()], 1)
        kinds = dict.fromkeys(("token_type_ids", "mm_token_type_ids"), (ids == token).long())
        given = {name: x for name, x in (given | kinds).items() if name in takes}
        yield "image tokens", {"input_ids": ids, **given}


def variants(model: nn.Module, kind: str, inputs: Inputs) -> Iterator[Variant]:
    """These inputs, and others that differ in masks, in padding and in the last token."""
    takes = inspect.signature(model.forward).parameters
    ids, target = inputs.get("input_ids"), inputs.get("decoder_input_ids")
    yield Variant(kind, inputs)
    for name, sequence in (("decoder_input_ids", target), ("input_ids", ids)):
        if sequence is not None:
            changed, earlier = sequence.clone(), torch.ones_like(sequence)
            changed[:, -1], earlier[:, -1] = _OTHER_TOKEN, 0
            label = f"{kind}, other last of {name}"
            yield Variant(label, inputs | {name: changed}, (), kind, (earlier,))
    if ids is not None and "attention_mask" in takes:
        ones = torch.ones_like(ids)
        yield Variant(f"{kind}, all-ones mask", inputs | {"attention_mask": ones})
        for side in ("right", "left") if ids.shape[1] == LENGTH else ("right",):
            mask = ones.clone()
            mask[1, :5], mask[2, :2] = 0, 0
            mask = mask.flip(1) if side == "right" else mask
            masks = {"attention_mask": mask}
            if target is not None and "decoder_attention_mask" in takes and side == "right":
                masks["decoder_attention_mask"] = torch.ones_like(target)
                masks["decoder_attention_mask"][1, -2:] = 0
            label, padded, valid = f"{kind}, {side} padding", inputs | masks, (*masks.values(),)
            yield Variant(label, padded, valid)
            others = padded | {"input_ids": ids.masked_fill(mask == 0, _OTHER_TOKEN)}
            yield Variant(f"{label} of other tokens", others, valid, label, valid)
        return
    name = next((n for n in ("input_values", "input_features", "pixel_values") if n in inputs), "")
    masked = "pixel_mask" if name == "pixel_values" else "attention_mask"
    if masked in takes and name:
        x = inputs[name]
        shapes = {"input_values": [x.shape], "input_features": [(BATCH, n) for n in x.shape[:0:-1]],
                  "pixel_values": [(BATCH, *x.shape[-2:])]}[name]  # fmt: skip
        for shape in shapes:
            mask = torch.ones(shape, dtype=torch.long)
            mask[1, ..., shape[-1] * 5 // 8 :] = 0
            yield Variant(f"{kind}, right padding of {shape[-1]}", inputs | {masked: mask})


def run(
    model: nn.Module, inputs: Inputs, *, dtype: torch.dtype = torch.float32, grad: bool = False
) -> Results:
    """The floating-point results of `forward`, with the same random numbers at each call."""
    torch.manual_seed(5)
    copies = {k: v.clone() if isinstance(v, Tensor) else v for k, v in inputs.items()}
    floats = {k: v for k, v in copies.items() if isinstance(v, Tensor) and v.is_floating_point()}
    with torch.set_grad_enabled(grad):
        return list(_tensors("", model(**copies | {k: v.to(dtype) for k, v in floats.items()})))


def _tensors(name: str, result: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(result, Tensor) and (result.is_complex() or result.is_floating_point()):
        yield name, torch.view_as_real(result) if result.is_complex() else result
    elif hasattr(result, "items"):
        for key, part in result.items():
            if key not in _NOT_RESULTS:
                yield from _tensors(f"{name}.{key}", part)
    elif isinstance(result, list | tuple):
        for i, part in enumerate(result):
            yield from _tensors(f"{name}[{i}]", part)


def at(masks: Masks, results: Results, *, only: bool = False) -> Results:
    """The results, 0 at positions that do not count. only: just those that a mask fits."""
    out = []
    for name, x in results:
        fitting = [m for mask in masks for m in (mask, mask.T) if x.shape[:2] == m.shape]
        if fitting:
            mask = fitting[0].view(*x.shape[:2], *[1] * (x.dim() - 2))
            out.append((name, x.masked_fill(mask == 0, 0)))
        elif not only:
            out.append((name, x))
    return out


def difference(a: Results, b: Results) -> float:
    """The largest difference, relative to the largest value of its tensor; inf: other shapes, or
    finite values elsewhere.
    """
    if [x.shape for _, x in a] != [x.shape for _, x in b]:
        return float("inf")
    worst = 0.0
    for (_, x), (_, y) in zip(a, b, strict=True):
        finite = x.isfinite()
        if not torch.equal(finite, y.isfinite()):
            return float("inf")
        if x.numel():
            x, y = x.masked_fill(~finite, 0).double(), y.masked_fill(~finite, 0).double()
            error, size = float((x - y).abs().max()), float(x.abs().max())
            worst = max(worst, error / size if size else error and float("inf"))
    return worst

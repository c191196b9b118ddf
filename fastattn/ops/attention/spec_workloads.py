"""Workloads of attention and attention_varlen for the benchmarks.

The first ones are those of published comparisons: 16k tokens, heads x head dim = 2048. The others
have padding, masks, dropout, windows, grouped heads, changed scores, short sequences, batches of
sentences, or a single query (decoding).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastattn.testing.spec import Inputs, Workload

_SEED = 0x7654_3210
_GPU, _CPU = ("cuda",), ("cpu",)
# Score modifications, batch of 1: the benchmarks check gradients of sinks and tables by head.
SCORE_CHANGES = ("alibi", "softcap", "sinks", "relative")
# Quantiles of the lengths of English sentences from the reference manual of a language, in subword
# tokens of a vocabulary of 8000, with END.
SENTENCE_LENGTHS = (
    7, 8, 9, 9, 10, 11, 11, 11, 12, 12, 13, 13, 14, 14, 14, 15, 15, 15, 16, 16, 17, 17, 17, 18, 18,
    18, 19, 19, 20, 20, 20, 21, 21, 21, 22, 22, 23, 23, 24, 24, 25, 25, 26, 27, 27, 28, 28, 29, 30,
    31, 32, 33, 34, 35, 36, 37, 39, 40, 42, 44, 47, 50, 56, 72,
)  # fmt: skip


def sentence_lengths(B: int) -> Tensor:
    """The lengths of a batch of B sentences: quantiles of the whole distribution, shuffled."""
    chosen = [SENTENCE_LENGTHS[(2 * b + 1) * len(SENTENCE_LENGTHS) // (2 * B)] for b in range(B)]
    chosen[-1] = SENTENCE_LENGTHS[-1]
    return torch.tensor(chosen)[torch.randperm(B, generator=torch.Generator().manual_seed(B))]


def spread_lengths(B: int, S: int) -> Tensor:
    """B random lengths, uniform in [S / 4, S]."""
    return torch.randint(S // 4, S + 1, (B,), generator=torch.Generator().manual_seed(S))


def padded_workload(
    name: str,
    B: int,
    H: int,
    S: int,
    D: int,
    devices: tuple[str, ...],
    *,
    K: int | None = None,
    M: int | None = None,
    causal: bool = False,
    window: int | None = None,
    padded: str = "",
    lengths: Tensor | None = None,
    mask: str | None = None,
    dropout_p: float = 0.0,
    scores: str = "",
    page: int | None = None,
    learned_mask: bool = False,
) -> Workload:
    """S keys and M queries (default S). padded: "", "keys" or "both". window: the left side of the
    window, with causal. mask: "bool BMN" or "float HMN". lengths: default `spread_lengths`. scores:
    one of SCORE_CHANGES; sinks and the table of "relative" get gradients. page: the keys in a page;
    k and v, which peers get, are contiguous. learned_mask: the mask gets a gradient; B must be 1.
    """
    K = H if K is None else K
    M = S if M is None else M
    lengths = spread_lengths(B, S) if lengths is None else lengths
    pairs = float(B * M * S)
    if padded:
        pairs = float((lengths.double() * (lengths if padded == "both" else M)).sum())
    if window is not None:
        pairs = float(B * (S * (window + 1) - window * (window + 1) / 2))
    elif causal:
        pairs /= 2
    flops = 4.0 * H * D * pairs

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        def data(*shape: int) -> Tensor:
            x = torch.randn(*shape, generator=generator, device=generator.device)
            return x.to(device=device, dtype=dtype)

        def keys() -> Tensor:  # caches are stored as [B, S, K, D]
            return data(B, K, S, D) if page is None else data(B, S, K, D).transpose(1, 2)

        inputs: Inputs = {"q": data(B, H, M, D), "k": keys(), "v": keys()}
        inputs["causal"] = causal
        if page is not None:
            inputs["page"] = page
        if window is not None:
            inputs["window"] = (window, 0)
        if padded:
            inputs["key_lengths"] = lengths.to(device=device, dtype=torch.int32)
        if padded == "both":
            inputs["query_lengths"] = inputs["key_lengths"]
        if mask is not None:
            inputs["mask"] = data(1, H, M, S) if mask == "float HMN" else data(B, 1, M, S) > -0.5
        if dropout_p:
            seed = torch.tensor([_SEED], device=device)
            inputs |= {"dropout_p": dropout_p, "dropout_seed": seed}
        if scores == "alibi":
            inputs["alibi_slopes"] = 2.0 ** -torch.linspace(1.0, 8.0, H, device=device)
        elif scores == "softcap":
            inputs["softcap"] = 50.0
        elif scores == "sinks":
            inputs["sinks"] = data(H)
        elif scores == "relative":
            inputs |= {"relative_bias": data(H, 32).float(), "relative_buckets": "t5_causal"}
            inputs["relative_max_distance"] = 128
        return inputs

    learned = {"sinks": ("sinks",), "relative": ("relative_bias",)}
    gradients = ("q", "k", "v", *learned.get(scores, ()), *["mask"] * learned_mask)
    moved = 4.0 * B * D * (H * M + K * S)
    decode = M == 1
    features = {
        "decode": decode,
        "causal": causal,
        "window": window is not None,
        f"padded_{padded}": padded,
        "gqa": K != H,
        "paged": page is not None,
        (mask or "").replace(" ", "_"): mask,
        "mask_gradient": learned_mask,
        "dropout": dropout_p,
        scores: scores,
    }
    return Workload(
        name,
        make,
        () if decode else gradients,  # decoding has no backward
        flops,
        moved,
        2.5 * flops,
        2.0 * moved,
        tuple(feature for feature, on in features.items() if on),
        devices,
    )


def _ordered(workload: Workload) -> Workload:
    """The same under torch.use_deterministic_algorithms, where a backward has the same bits in
    every call.
    """
    return replace(
        workload, name=workload.name + "_ordered", features=(*workload.features, "ordered")
    )


def packed_workload(
    name: str, lengths: Tensor, H: int, D: int, devices: tuple[str, ...]
) -> Workload:
    """Packed sequences, heads first as in spec_varlen.py."""
    total, longest = int(lengths.sum()), int(lengths.max())
    flops = 4.0 * H * D * float((lengths.double() ** 2).sum())

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        def data() -> Tensor:
            x = torch.randn(total, H, D, generator=generator, device=generator.device)
            return x.to(device=device, dtype=dtype).transpose(0, 1)

        offsets = torch.tensor([0, *lengths.tolist()], device="cpu").cumsum(0).int().to(device)
        return {
            "q": data(),
            "k": data(),
            "v": data(),
            "cu_seqlens_q": offsets,
            "cu_seqlens_k": offsets,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
            "causal": False,
        }

    moved = 8.0 * total * H * D
    return Workload(
        name, make, ("q", "k", "v"), flops, moved, 2.5 * flops, 2.0 * moved, ("packed",), devices
    )


_SPREAD = ((16, 16, 1024, 64), (16, 16, 2048, 128), (8, 16, 4096, 64))


def _padded_workloads() -> tuple[Workload, ...]:
    rows = []
    for D in (64, 128, 256):
        for causal in (False, True):
            for S in (512, 1024, 2048, 4096, 8192, 16384):
                name = f"b{16384 // S}_h{2048 // D}_s{S}_d{D}" + ("_causal" if causal else "")
                shape = (16384 // S, 2048 // D, S, D)
                rows.append(padded_workload(name, *shape, _GPU, causal=causal))
    for B, H, S, D in _SPREAD:
        for padded in ("keys", "both"):
            name = f"b{B}_h{H}_s{S}_d{D}_padded_{padded}"
            rows.append(padded_workload(name, B, H, S, D, _GPU, padded=padded))
    for D in (64, 128):
        shape = (4, 2048 // D, 4096, D)
        name = f"b4_h{2048 // D}_s4096_d{D}"
        rows.append(padded_workload(name + "_bool_mask", *shape, _GPU, mask="bool BMN"))
        rows.append(padded_workload(name + "_bias", *shape, _GPU, mask="float HMN"))
        rows.append(padded_workload(name + "_dropout", *shape, _GPU, dropout_p=0.1))
    rows.append(
        padded_workload("b1_h16_s4096_d128_bias_gradient", 1, 16, 4096, 128, _GPU,
                        mask="float HMN", learned_mask=True)
    )  # fmt: skip
    for D in (64, 128, 256):
        name = f"b8_h{2048 // D}_s2048_d{D}_causal"
        rows.append(_ordered(padded_workload(name, 8, 2048 // D, 2048, D, _GPU, causal=True)))
    rows.append(
        padded_workload("b4_h32_k8_s4096_d128_gqa", 4, 32, 4096, 128, _GPU, K=8, causal=True)
    )
    rows.append(
        padded_workload("b2_h16_s8192_d128_window1024", 2, 16, 8192, 128, _GPU, causal=True,
                        window=1024)
    )  # fmt: skip
    rows += [
        padded_workload(f"b1_h16_s16384_d128_causal_{scores}", 1, 16, 16384, 128, _GPU, causal=True,
                        scores=scores)
        for scores in SCORE_CHANGES
    ]  # fmt: skip
    for B, S in ((512, 64), (256, 128), (128, 256), (64, 512)):
        rows.append(padded_workload(f"b{B}_h8_s{S}_d64", B, 8, S, 64, _GPU))
    sentences = sentence_lengths(256)
    rows.append(
        padded_workload("b256_h8_s72_d64_sentences", 256, 8, 72, 64, _GPU, padded="both",
                        lengths=sentences)
    )  # fmt: skip
    for B, H, K, S, D in ((64, 32, 8, 8192, 128), (8, 32, 8, 32768, 128), (64, 16, 16, 2048, 64),
                          (1, 16, 16, 16384, 128)):  # fmt: skip
        name = f"b{B}_h{H}_k{K}_s{S}_d{D}_decode"
        rows.append(padded_workload(name, B, H, S, D, _GPU, K=K, M=1))

    for S in (16, 64, 128, 1024):
        for causal in (False, True):
            name = f"b2_h8_s{S}_d64" + ("_causal" if causal else "")
            rows.append(padded_workload(name, 2, 8, S, 64, _CPU, causal=causal))
    shape = (1, 8, 2048, 64)
    for scores in ("", *SCORE_CHANGES):
        name = "b1_h8_s2048_d64_causal" + (scores and f"_{scores}")
        rows.append(padded_workload(name, *shape, _CPU, causal=True, scores=scores))
    shape = (2, 8, 512, 64)
    rows += [
        padded_workload("b2_h8_s1024_d64_padded_both", 2, 8, 1024, 64, _CPU, padded="both"),
        padded_workload("b2_h8_s512_d64_bool_mask", *shape, _CPU, mask="bool BMN"),
        padded_workload("b2_h8_s512_d64_bias", *shape, _CPU, mask="float HMN"),
        padded_workload("b2_h8_s512_d64_dropout", *shape, _CPU, dropout_p=0.1),
        padded_workload("b1_h8_s512_d64_bias_gradient", 1, 8, 512, 64, _CPU, mask="float HMN",
                        learned_mask=True),
        _ordered(padded_workload("b2_h8_s128_d64_causal", 2, 8, 128, 64, _CPU, causal=True)),
        padded_workload("b2_h8_k2_s512_d64_gqa", *shape, _CPU, K=2, causal=True),
        padded_workload("b2_h8_s1024_d64_window128", 2, 8, 1024, 64, _CPU, causal=True, window=128),
        padded_workload("b16_h8_s72_d64_sentences", 16, 8, 72, 64, _CPU, padded="both",
                        lengths=sentence_lengths(16)),
        *[padded_workload(f"b2_h8_s{S}_d64_decode", 2, 8, S, 64, _CPU, M=1)
          for S in (32, 256, 1024)],
        *[padded_workload(f"b8_h32_k8_s2048_d128_decode_paged{page}", 8, 32, 2048, 128, _CPU, K=8,
                          M=1, page=page) for page in (16, 256)],
    ]  # fmt: skip
    return tuple(rows)


def _packed_workloads() -> tuple[Workload, ...]:
    rows = [
        packed_workload(f"b{B}_h{H}_s{S}_d{D}_packed", spread_lengths(B, S), H, D, _GPU)
        for B, H, S, D in _SPREAD
    ]
    rows.append(packed_workload("b256_h8_d64_sentences", sentence_lengths(256), 8, 64, _GPU))
    rows.append(packed_workload("b2_h8_s512_d64_packed", spread_lengths(2, 512), 8, 64, _CPU))
    return tuple(rows)


def _weights_workloads() -> tuple[Workload, ...]:
    """Workloads of attention that also return the weights, averaged over the heads."""
    found = []
    for name, B, H, S, D, mask in (
        ("b8_h4_s128_d64_weights", 8, 4, 128, 64, None),
        ("b2_h8_s512_d64_bias_weights", 2, 8, 512, 64, "float HMN"),
    ):
        attention = padded_workload(name, B, H, S, D, ("cuda", "cpu"), mask=mask)

        def make(*args: Any, attention: Workload = attention) -> Inputs:
            return attention.make(*args) | {"average": True}

        weights = 2.0 * B * S * S
        found.append(
            replace(
                attention,
                make=make,
                bytes=attention.bytes + weights,
                backward_bytes=attention.backward_bytes + weights,
            )
        )
    return tuple(found)


PADDED_WORKLOADS = _padded_workloads()
PACKED_WORKLOADS = _packed_workloads()
WEIGHTS_WORKLOADS = _weights_workloads()

"""Candidate configs of the Triton attention backward, for benchmarks/tune_attention.py."""

from dataclasses import replace

import torch

from fastattn.ops.attention.triton.bwd_config import BwdConfig, BwdTile, bwd_config

_T = BwdTile

# By architecture (fp32: any NVIDIA) and largest head dim: tiles for dq, tiles for dkdv. The half
# precision ones compile without spills in their loops over full tiles, for calls without options.
_CANDIDATES: dict[tuple[str, int], tuple[tuple[BwdTile, ...], tuple[BwdTile, ...]]] = {
    ("fp32", 64): (
        (_T(64, 32, 4, 1), _T(32, 64, 4, 1), _T(32, 32, 8, 1), _T(64, 32, 8, 1)),
        (_T(32, 64, 8, 1), _T(32, 32, 4, 1), _T(64, 32, 8, 1)),
    ),
    ("fp32", 128): (
        (_T(32, 64, 8, 1), _T(64, 32, 8, 1), _T(16, 32, 4, 1)),
        (_T(32, 64, 8, 1), _T(64, 32, 8, 1), _T(32, 16, 8, 1)),
    ),
    ("fp32", 256): ((_T(32, 32, 8, 1), _T(16, 16, 4, 1)), (_T(32, 32, 8, 1), _T(16, 16, 8, 1))),
    ("sm_90", 64): (
        (
            _T(128, 64, 8, 3, tma=True), _T(128, 64, 8, 3), _T(64, 64, 4, 2, tma=True),
            _T(64, 64, 4, 3, tma=True),
            _T(64, 64, 4, 3), _T(128, 128, 8, 2, tma=True), _T(64, 128, 4, 2, tma=True),
            _T(128, 64, 8, 2, tma=True), _T(128, 64, 8, 3, tma=True, edge_stages=2),
        ),
        (
            # The register limit allows three programs per SM.
            _T(64, 64, 4, 2, tma=True, maxnreg=168), _T(64, 64, 4, 3, tma=True, maxnreg=168),
            _T(64, 128, 8, 3), _T(64, 64, 4, 3), _T(64, 64, 4, 3, tma=True),
            _T(64, 128, 8, 2, tma=True), _T(64, 128, 8, 3, tma=True, late=True),
        ),
    ),
    ("sm_90", 128): (
        (
            _T(128, 64, 8, 3), _T(64, 64, 4, 2, tma=True), _T(128, 128, 8, 2, tma=True),
            _T(128, 64, 8, 2, tma=True), _T(128, 64, 8, 3, tma=True, edge_stages=2),
        ),
        (
            _T(64, 128, 8, 2, tma=True, late=True), _T(64, 128, 8, 3, tma=True),
            _T(64, 128, 8, 3, tma=True, late=True), _T(64, 128, 8, 3), _T(64, 64, 4, 2, tma=True),
            _T(32, 128, 8, 3), _T(32, 128, 8, 3, tma=True), _T(64, 64, 8, 2, tma=True),
        ),
    ),
    ("sm_90", 256): (
        (_T(64, 32, 4, 2, tma=True), _T(64, 64, 8, 2, tma=True), _T(128, 32, 8, 2)),
        (_T(64, 64, 8, 2, tma=True), _T(64, 64, 4, 2, tma=True), _T(64, 128, 8, 1, tma=True)),
    ),
    ("sm_80", 64): (
        (_T(128, 32, 4, 3), _T(64, 32, 4, 3)),
        (_T(32, 64, 4, 2), _T(64, 128, 8, 2), _T(64, 64, 4, 2)),
    ),
    ("sm_80", 128): ((_T(64, 32, 4, 3), _T(128, 32, 8, 2)), (_T(32, 128, 8, 2),)),
    ("sm_100", 64): (
        (_T(64, 64, 4, 2), _T(128, 64, 4, 2), _T(128, 128, 8, 2)),
        (_T(64, 64, 4, 2),),
    ),
    ("sm_100", 128): ((_T(128, 64, 8, 2), _T(128, 128, 8, 2)), (_T(64, 64, 4, 2),)),
}  # fmt: skip


def candidates(
    arch: str,
    dtype: torch.dtype,
    D: int,
    E: int,
    edges: bool = False,
    dense: bool = False,
) -> list[BwdConfig]:
    """Candidates: the shipped row, then rows that change one of its two kernels.

    The kernels run one after the other, so the best row combines the best dq and the best dkdv.
    """
    base = bwd_config(arch, dtype, D, E, edges, dense)
    width = max(D, E)
    limit = 64 if width <= 64 else 128 if width <= 128 else 256
    single = dtype == torch.float32 and arch.startswith("sm_")
    dqs, dkdvs = _CANDIDATES.get(("fp32" if single else arch, limit), ((), ()))
    rows = [base]
    if sum(base.widths(width)) < limit:
        rows.append(replace(base, halves=limit))  # one tile, padded
    rows += [replace(base, dq=tile) for tile in dqs]
    rows += [replace(base, dkdv=tile) for tile in dkdvs]
    return list(dict.fromkeys(rows))

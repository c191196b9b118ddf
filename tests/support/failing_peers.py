"""Candidates that fail, each in another way."""

import os
import time

import torch.nn.functional as F

from benchmarks.implementations import Implementation


def right(inputs):
    x = inputs["x"]
    return F.layer_norm(x, x.shape[-1:], inputs["weight"], inputs["bias"], inputs["eps"])


def wrong(inputs):
    return right(inputs) * 1.01


def wrong_gradient(inputs):
    y = right(inputs)
    return 2 * y - y.detach()


def dies(inputs):
    os.kill(os.getpid(), 9)


def hangs(inputs):
    time.sleep(1000)


def raises(inputs):
    raise RuntimeError("no good")


def peer(function, name=None, **options):
    name = name or function.__name__
    return Implementation(name, ("layer_norm",), lambda task: function, **options)


PEERS = [
    peer(right), peer(wrong), peer(wrong_gradient), peer(dies), peer(hangs), peer(raises),
    peer(right, "absent", unavailable=lambda: "is not installed"),
    peer(right, "refuses", unsupported=lambda task: f"has no {task.dtype}"),
]  # fmt: skip

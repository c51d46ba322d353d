"""Set-ups in which the mechanism is audited."""

from __future__ import annotations

from fastclip.audit.attack import Setting
from fastclip.audit.neighbours import Neighbours
from fastclip.clipping import (
    adaptive,
    automatic,
    bounded_adaptive,
    dp_sgd,
    dpsgd_f,
    naive_reweighting,
    per_layer,
    sad_dpsgd,
    soft_ada_clip,
)

SETTINGS = (
    Setting("full batch"),
    Setting("four steps", 2.0, 4, max_grad_norm=2.0),
    Setting("physical batches", 2.0, 4, physical=4096),
    Setting("lookup tables", lookup=True),
    Setting("tied weights", tied=True),
    Setting("order of the loader", poisson=False),
    Setting("q = 0.2", steps=10, rate=0.2),
    Setting("q = 0.05, physical", 0.7, 40, rate=0.05, physical=1024),
    Setting("automatic", clipping=automatic()),
    Setting("adaptive, counts", 1.4, 2, clipping=adaptive(count_noise_ratio=6.0)),
    Setting("SoftAdaClip", 1.4, 2, clipping=soft_ada_clip()),
    Setting("bounded, normalized", 1.4, 2, clipping=bounded_adaptive(lower=0.2)),
    Setting("groups", 1.4, 2, clipping=dpsgd_f(2, thresholds="previous_step"), groups=2),
    Setting("groups, same step", 1.4, 2, clipping=dpsgd_f(2, count_noise_ratio=2.0), groups=2),
    Setting("reweighted, same step", 1.4, 2, clipping=naive_reweighting(2), groups=2, expected=2.0),
    Setting("per layer", clipping=per_layer(), max_grad_norm=(0.3, 0.4, 0.05)),
    Setting("stages", 2.0, 4, clipping=sad_dpsgd(4)),
    Setting("weighted draws", steps=10, rate=0.2, weighted=True),
    Setting("cut draws", 2.0, 10, rate=0.2, cut=0.9),
    Setting("240 steps", steps=240, rate=0.05, most=10_000),
    Setting("secure", secure=True),
    Setting("units of 3 rows", rows=3),
    Setting("units, q = 0.2", steps=10, rate=0.2, rows=2),
    Setting("two ranks", 1.4, 2, ranks=2),
    Setting("two ranks, q = 0.2", steps=10, rate=0.2, ranks=2),
)

NEIGHBOURS = (
    Neighbours("N and N + 1", clipping=dp_sgd()),
    Neighbours("N and N + 1, adaptive", clipping=adaptive()),
)

"""Shapes of the layers in the steps that bench.gpu_card times: models and batches that have a goal.

tests/bench/test_shapes.py finds them again in the models themselves. Index letters: b sample, t
position, d input and p output feature, v rows of a table, c input and o output channel, k group.
"""

from __future__ import annotations

GOALS = ("ResNet-50", "ViT-B", "BERT T128", "BERT T512", "GPT-2")
"""The models' names in the cases, which run before all others."""

_BLOCK = ((768, 768), (768, 3072), (3072, 768))
_BERT = {"BERT T128": (256, 128), "BERT T512": (64, 512)}

LINEAR: list[tuple[str, int, int, int, int]] = [  # model, b, t, d, p
    *((name, b, t, d, p) for name, (b, t) in _BERT.items() for d, p in _BLOCK),
    *(("GPT-2", 16, 1024, d, p) for d, p in ((768, 2304), (768, 768), (768, 3072), (3072, 768))),
    *(("ViT-B", 128, 197, d, p) for d, p in _BLOCK),
]
"""Layers of the blocks; heads have one position."""

VOCABULARY = ("GPT-2", 16, 1024, 768, 50257)
"""The language model's head, tied to its table."""

LOOKUPS: list[tuple[str, int, int, int, int, str]] = [  # model, b, t, v, d, kind of ids
    *((name, b, t, 30522, 768, "text") for name, (b, t) in _BERT.items()),
    ("GPT-2", 16, 1024, 50257, 768, "text"),
]

LAYER_NORMS: list[tuple[str, int, int, int]] = [  # model, b, t, c
    *((name, b, t, 768) for name, (b, t) in _BERT.items()),
    ("GPT-2", 16, 1024, 768), ("ViT-B", 128, 197, 768),
]  # fmt: skip


def _resnet50() -> list[tuple[str, int, int, int, int, int, int]]:
    """Every convolution of another geometry: model, b, c, o, kernel, stride, size of the input."""
    found = [("ResNet-50", 128, 3, 64, 7, 2, 224)]
    channels, size = 64, 56
    for stage in range(4):
        width, stride = 64 * 2**stage, 1 if stage == 0 else 2
        out = size // stride
        for c, o, kernel, step, pixels in (
            (channels, width, 1, 1, size),
            (width, width, 3, stride, size),
            (width, 4 * width, 1, 1, out),
            (channels, 4 * width, 1, stride, size),
            (4 * width, width, 1, 1, out),
            (width, width, 3, 1, out),
        ):
            layer = ("ResNet-50", 128, c, o, kernel, step, pixels)
            if layer not in found:
                found.append(layer)
        channels, size = 4 * width, out
    return found


CONVOLUTIONS = _resnet50()
GROUP_NORMS: list[tuple[str, int, int, int, int]] = [  # model, b, c, pixels, k
    ("ResNet-50", 128, c, size**2, 32)
    for c, size in (
        (64, 112), (64, 56), (256, 56), (128, 56), (128, 28), (512, 28), (256, 28), (256, 14),
        (1024, 14), (512, 14), (512, 7), (2048, 7),
    )
]  # fmt: skip

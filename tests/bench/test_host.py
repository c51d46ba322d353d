"""Launches of a private step on a GPU, counted on one that computes nothing: none is added unseen."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch

FIRST = """
import json, warnings
warnings.filterwarnings("ignore")
from bench import host
*_, first = host.prepared("resnet50", "fastclip")
print(json.dumps(first))
"""
MOST = {"codes": 100, "trials": 135}
"""What the first step of a ResNet-50 compiles and tries: 97 and 131 measured, with tails."""
CODE = """
import json, warnings
warnings.filterwarnings("ignore")
from bench import host, null_gpu
found = {}
for mode in host.MODES:
    step, *_ = host.prepared("bert_base", mode)
    null_gpu.launches(True)
    step()
    found[mode] = null_gpu.launches(False)
print(json.dumps(found))
"""
ADDED = -140
"""Launches that privacy adds to a step of BERT-base, whose casts and sums are fewer: -147 measured."""


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.version.cuda is not None
        or importlib.util.find_spec("triton") is None
        or not all(map(shutil.which, ("c++", "cc", "ninja"))),
        reason="needs PyTorch without CUDA, Triton and a compiler",
    ),
]


def told(code: str) -> Any:
    """What a program prints last, in a process of its own where Triton compiles for a GPU."""
    plain = {
        k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "FASTCLIP_BACKEND")
    }
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=plain, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_first_step_of_a_resnet() -> None:
    found = {kind: sum(n.values()) for kind, n in told(FIRST).items()}
    assert 0 < found["codes"] <= MOST["codes"]
    assert 0 < found["trials"] <= MOST["trials"]


def test_bert_base() -> None:
    found = told(CODE)
    total = {mode: sum(sum(n.values()) for n in kinds.values()) for mode, kinds in found.items()}
    assert total["fastclip"] - total["non_private"] <= ADDED
    triton = found["fastclip"]["triton"]
    assert triton["_clip_kernel"] == 1
    assert triton["_norms_kernel"] <= 6  # of three shapes of layers, not of each layer
    assert "_finish_kernel" not in triton  # a tile of all positions ends with the norm
    assert not found["non_private"]["triton"]

"""Every kernel compiles for Ampere and Hopper without a GPU, and the code is what it should be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.kernels import static
from fastclip.ops.triton import KERNELS

ROOT = Path(__file__).resolve().parents[3]


def compiled(folder: Path, *options: str) -> list[dict[str, Any]]:
    """The rows of bench.kernels.static, from a process that does not interpret; no row has a fault."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    out = folder / "static.json"
    done = subprocess.run(
        [sys.executable, "-m", "bench.kernels.static", "--jobs", "1", "--out", str(out), *options],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    return json.loads(out.read_text())["rows"]


@pytest.mark.slow
def test_first_configurations(tmp_path: Path) -> None:
    rows = compiled(tmp_path, "--quick")
    assert {row["arch"] for row in rows} == {"sm_80", "sm_90"}
    by_kernel = {row["kernel"]: row for row in rows if row["arch"] == "sm_90"}
    for name in ("ghost_norms._norms_kernel", "scaled_sum._tiles_kernel", "conv_norm._tiles"):
        assert by_kernel[name]["mma" if name.startswith("conv") else "wgmma"]  # of small groups
        assert by_kernel[name]["copies"]["16"]


def test_rows_of_other_forms_stay() -> None:
    """Of those that still exist; a row that serves other forms, too, stays for these."""
    again = next(t for t in static.tasks(False, False, "ghost_norm ViT-B") if t[:2] == (90, "fp32"))
    forms = (
        ["ghost_norm ViT-B fp32"],
        ["ghost_norm ViT-B fp32", "ghost_norm GPT-2 fp32"],
        ["gone fp32"],
    )
    rows = [{"arch": arch, "forms": names} for arch in ("sm_80", "sm_90") for names in forms]
    left = [(row["arch"], *row["forms"]) for row in static.others(rows, [again])]
    assert left == [("sm_80", *forms[0]), ("sm_80", *forms[1]), ("sm_90", "ghost_norm GPT-2 fp32")]


@pytest.mark.slow
def test_every_configuration(tmp_path: Path) -> None:
    rows = compiled(tmp_path)
    modules = {launcher.__module__.rpartition(".")[2] for launcher in KERNELS.values()}
    modules |= {"one_position", "ghost_sums"}  # of ghost_norm, instantiated_norm and ghost_norms
    modules.remove("conv_arguments")  # it copies, and launches nothing of ours
    assert {row["kernel"].partition(".")[0] for row in rows} == modules

"""What bench.gpu finds on a machine: wheels that it brings, what is missing, the card, versions."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.measure import first_line

INSTALL_SECONDS = 60


@contextmanager
def wheels(folder: Path | None) -> Iterator[str | None]:
    """The packages of a folder of wheels, for this process and those that it starts.

    They are unpacked into a temporary folder; nothing is fetched, and nothing installed is replaced
    or removed.

    Yields:
        why they cannot be used, or None.
    """
    if folder is None:
        yield None
        return
    found = sorted(map(str, folder.glob("*.whl")))
    if not found:
        yield f"--wheels: {folder.name} holds no *.whl"
        return
    with tempfile.TemporaryDirectory() as site:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps",
                   "--no-compile", "--target", site, *found]  # fmt: skip
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
            )
            said = done.stderr.strip().splitlines() if done.returncode else None
        except subprocess.TimeoutExpired:
            said = [f"pip did not end within {INSTALL_SECONDS} s"]
        if said is not None:
            yield f"--wheels: {(said or ['pip failed'])[-1]}"
            return
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (site, before)))
        sys.path.insert(0, site)
        importlib.invalidate_caches()
        try:
            yield None
        finally:
            sys.path.remove(site)
            del os.environ["PYTHONPATH"]
            if before is not None:
                os.environ["PYTHONPATH"] = before


def problems(device: str) -> list[str]:
    """What stands in the way, and what to do about it."""
    found = []
    if device == "cuda" and not torch.cuda.is_available():
        found.append("torch sees no NVIDIA GPU: nothing can be measured here")
    needed = {
        "opacus": "fastclip builds on it, so neither its kernels nor its steps run: "
        "python -m pip install --no-deps 'opacus>=1.6,<1.7', or --wheels with a wheel of it",
        "transformers": "the models of the steps need it",
    }
    for name, why in needed.items():
        if importlib.util.find_spec(name) is None:
            found.append(f"{name} is not installed: {why}")
    if not found:
        try:
            importlib.import_module("fastclip.ops")
            if device == "cuda":
                importlib.import_module("fastclip.kernels")
        except Exception as error:
            found.append(f"fastclip cannot be imported: {first_line(error)}")
    return found


def environment(device: str) -> dict[str, Any]:
    """The card, its driver, compilers and libraries."""
    found: dict[str, Any] = {"card": "none: a trial on the CPU", "versions": _versions()}
    found["python"] = sys.version.split()[0]
    found["nvcc"] = _first_match(["nvcc", "--version"], r"release ([\d.]+)")
    if device != "cuda":
        return found
    card = torch.cuda.get_device_properties(0)
    found |= {
        "card": card.name,
        "capability": f"{card.major}.{card.minor}",
        "memory_gib": round(card.total_memory / 2**30, 1),
        "multiprocessors": card.multi_processor_count,
        "l2_mib": round(getattr(card, "L2_cache_size", 0) / 2**20),
        "driver": _first_match(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], r"([\d.]+)"
        ),
        "cuda": torch.version.cuda,
        "allow_tf32": {
            "matmul": torch.backends.cuda.matmul.allow_tf32,
            "cudnn": torch.backends.cudnn.allow_tf32,
        },
    }
    return found


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "triton", "opacus", "transformers", "cryptography", "pytest", "fastclip"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    fastclip = sys.modules.get("fastclip")
    if fastclip is not None:  # of this checkout, installed or not
        found["fastclip"] = fastclip.__version__
    return found


def _first_match(command: list[str], pattern: str) -> str:
    """The first group that `pattern` finds in what a command prints, or why there is none."""
    if shutil.which(command[0]) is None:
        return "not found"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return type(error).__name__
    match = re.search(pattern, done.stdout)
    return match.group(1) if match else "unknown"

"""Long runs: many steps, and many passes over a loader with worker processes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import psutil
from torch.utils.data import DataLoader
from tqdm import tqdm

from bench.load.training import Training, classifier, rows
from bench.load.verdicts import Curve, handles, verdict
from fastclip import clipping

ROWS = 2000


def steps(scale: float, each_step: Any = None) -> dict[str, Any]:
    """10^5 steps on Poisson batches, with a threshold that moves and a ledger on disk.

    Args:
        scale: of the number of steps. each_step: called after every step, for tests.
    """
    total = max(int(100_000 * scale), 40)
    loader = DataLoader(rows(ROWS), batch_size=16)
    training = Training(classifier(), loader, clipping=clipping.adaptive())
    engine, curve, done = training.engine, Curve(), 0
    with tempfile.TemporaryDirectory() as folder, tqdm(total=total, unit="step") as bar:
        engine.write_ahead(Path(folder) / "ledger")
        while done < total:
            for x, y in training.loader:
                training.step(x, y)
                done += 1
                curve.tick()
                if each_step is not None:
                    each_step()
                if done % max(total // 100, 1) == 0:
                    curve.sample(done)
                    bar.update(done - bar.n)
                if done == total:
                    break
        recorded = sum(count for _, _, count in engine.accountant.history)
        engine.write_ahead(None)
    return {
        "case": "steps",
        "what": f"{total:,} steps, moving threshold, ledger on disk",
        "curve": curve.samples,
        "epsilon": engine.get_epsilon(1e-5),
        "verdicts": [*curve.verdicts(), verdict("steps not in the ledger", total - recorded, 0)],
    }


def workers(scale: float) -> dict[str, Any]:
    """Passes over a loader with two worker processes, each pass with an iterator of its own."""
    passes = max(int(100 * scale), 6)
    training = Training(classifier(), DataLoader(rows(64), batch_size=16, num_workers=2))
    before = None
    for number in tqdm(range(passes), unit="pass"):
        for x, y in training.loader:
            training.step(x, y)
        if number == 1:
            before = handles()
    assert before is not None
    children = len(psutil.Process().children(recursive=True))
    return {
        "case": "workers",
        "what": f"{passes} passes over a loader with 2 workers",
        "verdicts": [
            verdict("handles grown", handles() - before, 0),
            verdict("worker processes left", children, 0),
        ],
    }

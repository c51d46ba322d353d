"""A fork in the middle of training, after which parent and child both go on."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from bench.faults.outcomes import ERROR, EXACT, Outcome, check_ledger, counted, expect, same
from bench.faults.processes import in_fork
from bench.faults.runs import Run
from fastclip.errors import FastclipError

STEPS = 3


def _child(run: Run, number: int, batch: list[torch.Tensor], folder: Path) -> None:
    try:
        run.step(number, batch)
        torch.save(run.weights(), folder / "child")
    except FastclipError as error:
        (folder / "refused").write_text(str(error))


def fork(noise: str, seed: int, folder: Path) -> Outcome:
    """Both take the step that comes; the noise of the two must differ, or one be refused.

    Args:
        noise: "own", "global" (generators), "secure", or "ledger": an own one, and a ledger on disk,
            which is the parent's.
    """
    ledger = folder / "ledger" if noise == "ledger" else None
    secure, kind = noise == "secure", "global" if noise == "global" else "own"
    run = Run("plain", seed, ledger, secure=secure, noise=kind)
    run.noise_by_step = False
    moved: dict[str, torch.Tensor] = {}
    for number, batch in run.batches():
        if number == STEPS:
            in_fork(partial(_child, run, number, batch, folder), folder / "said")
        run.step(number, batch)
        if number == STEPS:
            moved = run.weights()
    if ledger is not None:
        check_ledger(counted(ledger), run.released, faults=0)
    refused = (folder / "refused").exists()
    if refused:
        expect(not (folder / "child").exists(), "the child was refused, and has released")
    else:
        theirs = torch.load(folder / "child")
        expect(
            not any(same(theirs[name], moved[name]) for name in moved), "one noise, released twice"
        )
    if noise != "secure":
        alone = Run("plain", seed, noise=kind)
        alone.noise_by_step = False
        for number, batch in alone.batches():
            alone.step(number, batch)
        expect(
            same(run.state(), alone.state()), "the parent ends elsewhere than a run without a child"
        )
    told = "the child is refused" if refused else "the child draws noise of its own"
    return Outcome(ERROR if refused else EXACT, f"{told}; the parent goes on")

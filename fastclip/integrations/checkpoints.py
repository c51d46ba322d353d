"""What a Trainer's checkpoint says about privacy, and the seeds of the draws."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from fastclip.errors import ArgumentError
from fastclip.integrations.spent import load_spent, read_spent, spent_state

ACCOUNTANT_NAME = "privacy_accountant.json"
"""File of a checkpoint that holds what was spent."""

_RUN_STRIDE = 1_000_003
"""Between the seeds of two runs of one trainer: more than either has epochs."""


@dataclass(frozen=True)
class Resumed:
    """The privacy of a checkpoint, read before anything of this run is changed."""

    folder: str
    saved: dict[str, Any]
    run: int
    """Which of its trainer's runs the checkpoint belongs to."""

    def load(self, accountant: Any) -> None:
        """Go on from there."""
        load_spent(accountant, self.saved, self.folder)

    def check_budget(self, sigma: float, rate: float) -> None:
        """Refuse noise that was found for another length than the checkpoint's run had.

        Raises:
            ArgumentError: with the way out.
        """
        if "noise_multiplier" not in self.saved:
            return
        before, q = self.saved["noise_multiplier"], self.saved["sample_rate"]
        if not (math.isclose(sigma, before, rel_tol=1e-9) and math.isclose(rate, q, rel_tol=1e-9)):
            raise ArgumentError(
                f"{self.folder} was trained with noise_multiplier={before:.6g} at a sampling rate of "
                f"{q:.6g}, but target_epsilon gives {sigma:.6g} at {rate:.6g} as if nothing had been "
                "spent, so the budget would be exceeded; resume with the batch, the epochs and the "
                f"target of that run, or pass noise_multiplier={before!r} and watch epsilon"
            )


def read_checkpoint(folder: str, accountant: Any) -> Resumed:
    """What a checkpoint's run has spent; the accountant is not changed.

    Raises:
        ArgumentError: if it does not say, or is of another accountant.
    """
    path = os.path.join(folder, ACCOUNTANT_NAME)
    if not os.path.isfile(path):
        raise ArgumentError(
            f"{folder} holds no {ACCOUNTANT_NAME}, so what its run has spent is not known; "
            "resume from a checkpoint of a PrivateTrainer, or load its model and train anew"
        )
    with open(path, encoding="utf-8") as file:
        try:
            saved = json.load(file)
        except ValueError:
            saved = None  # which read_spent refuses
    read_spent(saved, accountant, path)
    return Resumed(folder, saved, int(saved.get("run", 0)))


class Releases(TrainerCallback):
    """Saves what was spent with every checkpoint; seeds every epoch's draws if data_seed is set."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """As Accelerate does, so that a resumed epoch skips the batches that were drawn before."""
        if args.data_seed is not None:
            seed = args.data_seed + int(state.epoch or 0) + _RUN_STRIDE * self.trainer.run_number
            self.trainer.sampling_generator.manual_seed(seed)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Beside the optimizer's state, whose steps it prices."""
        path = os.path.join(args.output_dir, f"checkpoint-{state.global_step}", ACCOUNTANT_NAME)
        trainer = self.trainer
        saved = {
            **spent_state(trainer.engine.accountant), "run": trainer.run_number,
            "noise_multiplier": trainer.mechanism[0], "sample_rate": trainer.mechanism[1],
        }  # fmt: skip
        with open(path, "w", encoding="utf-8") as file:
            json.dump(saved, file)

"""What a Trainer's checkpoint says about privacy, and the seeds of the draws."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback

from fastclip.accounting.segments import History, joined, read_segments
from fastclip.errors import ArgumentError
from fastclip.files import write_whole
from fastclip.integrations.budget import Budget

ACCOUNTANT_NAME = "privacy_accountant.json"
"""File of a checkpoint that holds what was spent."""

_DIGEST = "file_digest"
"""Of all that the file says, the run whose draws go on among it."""
_RUN_STRIDE = 1_000_003
"""Between the seeds of runs that begin a step apart: more than either has epochs."""


@dataclass(frozen=True)
class Resumed:
    """The privacy of a checkpoint, read before anything of this run is changed."""

    folder: str
    saved: dict[str, Any]
    run: int
    """The number of the checkpoint's run (`AccountedCheckpoints`)."""
    steps: int
    """How many the checkpoint's ledger holds."""

    def draws_on(self, recorded: int, rate: float, processes: int) -> bool:
        """The draws of that run go on where the checkpoint left them.

        Rows are drawn as in that run, and no step is known that came after the checkpoint.

        Args:
            recorded: steps in this run's ledger, in which those of the checkpoint are.
        """
        now = {"sample_rate": rate, "processes": processes}
        same = all(self.saved.get(name, value) == value for name, value in now.items())
        return same and recorded == self.steps

    def check(self, trainer: Any, steps: int) -> None:
        """Refuse to go on where the budget would be exceeded, or the strategy begin again.

        Args:
            trainer: about to take its first step.
            steps: those to come.

        Raises:
            ArgumentError: with the way out.
        """
        optimizer, accountant = trainer.dp_optimizer, trainer.engine.accountant
        state, done = optimizer.keeper.clipping, trainer.state.global_step
        if not state.strategy.constant and state.step != done:
            raise ArgumentError(
                f"{self.folder} holds no state of {state.strategy.kind} after {done} steps "
                "(save_only_model=True, or another strategy), so its thresholds and noise would begin "
                "again; resume from a checkpoint with the optimizer's state, or load its model and "
                "train anew under this engine"
            )
        if trainer.privacy.target_epsilon is not None:
            before = self.saved.get("noise_multiplier", "the run's")
            Budget(trainer.privacy.target_epsilon, trainer.privacy.target_delta).check(
                accountant, optimizer, trainer.engine.sampling, steps,
                "resume with the batch, the epochs and the target of that run, or pass "
                f"noise_multiplier={before} and watch epsilon",
            )  # fmt: skip


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
            saved = None  # which is refused
    whole = not isinstance(saved, dict) or saved.pop(_DIGEST, None) in (None, _digest(saved))
    held = read_segments(saved if whole else None, accountant.mechanism(), path)
    return Resumed(folder, saved, int(saved.get("run", 0)), _steps(joined(held)))


def _steps(history: History) -> int:
    return sum(steps for *_, steps in history)


def _digest(saved: dict[str, Any]) -> str:
    """Of what a file says; numbers as JSON writes them."""
    return hashlib.sha256(json.dumps(saved, sort_keys=True).encode()).hexdigest()


class AccountedCheckpoints(TrainerCallback):
    """Saves what was spent with every checkpoint, checks a resumed run, seeds the epochs' draws.

    Steps are accounted as if their draws were independent, so none may come again under one ledger.
    Seeds follow from the number of the epoch and that of the run: how many steps the ledger held when
    its draws began, whoever took them, in this process or, by the engine's file (`write_ahead`), in one
    that was killed. Only a resumed run whose ledger is the checkpoint's keeps that one's number.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self._newest: int | None = None
        """The epoch of the run that has begun last."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Everything is loaded, and nothing has been released."""
        self._newest = None
        if self.trainer.resumed is not None:
            self.trainer.resumed.check(self.trainer, state.max_steps - state.global_step)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """As Accelerate does, so that a resumed epoch skips the batches that were drawn before.

        The epoch is told by the steps, as the Trainer tells it when it resumes. After one that ended
        early it may be the same again: what follows has the number of another run.
        """
        trainer, resumed = self.trainer, self.trainer.resumed
        epoch = state.global_step // len(trainer.private_loader)
        recorded = _steps(trainer.engine.accountant.history)
        how = trainer.mechanism[1], args.world_size
        if self._newest is None and resumed is not None and resumed.draws_on(recorded, *how):
            trainer.run_number = resumed.run
        elif self._newest is None or epoch <= self._newest:
            trainer.run_number = recorded
        self._newest = epoch
        trainer.seed_draws(epoch + _RUN_STRIDE * trainer.run_number)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Beside the optimizer's state, whose steps it prices."""
        if not state.is_world_process_zero:
            return
        path = os.path.join(args.output_dir, f"checkpoint-{state.global_step}", ACCOUNTANT_NAME)
        trainer = self.trainer
        saved = {
            **trainer.engine.accountant.state_dict(), "run": trainer.run_number,
            "noise_multiplier": trainer.mechanism[0], "sample_rate": trainer.mechanism[1],
            "processes": trainer.args.world_size,
        }  # fmt: skip
        text = json.dumps({**saved, _DIGEST: _digest(saved)})
        write_whole(path, lambda file: file.write_text(text, encoding="utf-8"))

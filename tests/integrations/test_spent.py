"""Resumed trainers: what is accounted never becomes less."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fastclip.integrations.huggingface import check_still_private
from fastclip.integrations.trainer_run import read_checkpoint
from tests.integrations.test_trainer import STEPS
from tests.integrations.tiny import NOISE_SEED, bert, hf, pad, trainer
from tests.refusal import refused

SAVING = {"save_strategy": "steps", "save_steps": 2}


def taken(run) -> int:
    return sum(steps for _, _, steps in run.engine.accountant.history)


def at_begin(run) -> list[tuple[int, float]]:
    """(step, epsilon) of the log's entries that hold nothing else."""
    names = {"epsilon", "epoch", "step"}
    found = [entry for entry in run.state.log_history if not {*entry} - names]
    return [(entry["step"], entry["epsilon"]) for entry in found]


def test_epsilon_is_logged_before_the_first_step_of_a_run_that_is_not_new(tmp_path: Path) -> None:
    """Of a checkpoint, and of an earlier train() of the same trainer; once."""
    run = trainer(tmp_path, arguments=SAVING)
    run.train()
    spent = run.epsilon()
    assert at_begin(run) == []
    run.train()
    assert at_begin(run) == [(0, spent)]
    resumed = trainer(tmp_path, arguments=SAVING)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    _, (step, epsilon) = at_begin(resumed)  # after that of the checkpoint's own run
    assert step == 2
    assert spent < epsilon < run.epsilon()


@pytest.mark.slow
def test_resuming_the_same_trainer_adds_up(tmp_path: Path) -> None:
    run = trainer(tmp_path, arguments=SAVING)
    run.train()
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert taken(run) == STEPS + STEPS - 2


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", [str, Path])
def test_resuming_under_a_shared_engine_adds_up(tmp_path: Path, form) -> None:
    """The checkpoint's steps, those of the other trainer, and those that follow."""
    trainer(tmp_path / "a", arguments=SAVING).train()
    other = trainer(tmp_path / "b")
    other.train()
    run = trainer(tmp_path / "a", arguments=SAVING, engine=other.engine)
    run.train(resume_from_checkpoint=form(tmp_path / "a" / "checkpoint-2"))
    assert taken(run) == STEPS + 2 + STEPS - 2


@pytest.mark.slow
@pytest.mark.parametrize("text", [None, "{", "[]"])
@pytest.mark.one_in(3)
def test_a_resume_that_fails_forgets_nothing(tmp_path: Path, text: str | None) -> None:
    run = trainer(tmp_path, arguments=SAVING)
    run.train()
    spent = run.epsilon()
    path = tmp_path / "checkpoint-4" / "privacy_accountant.json"
    path.unlink() if text is None else path.write_text(text)
    with refused("Resume from a"):
        run.train(resume_from_checkpoint=str(path.parent))
    assert run.epsilon() == spent > 0


@pytest.mark.slow
def test_a_file_of_which_a_field_was_changed(tmp_path: Path) -> None:
    """Every field: what was spent, and the run whose draws go on; files of before have no digest."""
    run = trainer(tmp_path, arguments=SAVING)
    run.train()
    path = tmp_path / "checkpoint-4" / "privacy_accountant.json"
    saved = json.loads(path.read_text())
    assert {"history", "run", "sample_rate", "processes", "file_digest"} <= saved.keys()
    for name, value in saved.items():
        wrong = value + 1 if isinstance(value, (int, float)) else [value]
        path.write_text(json.dumps({**saved, name: wrong}))
        with refused("Resume from a"):
            read_checkpoint(str(path.parent), run.engine.accountant)
    old = {name: value for name, value in saved.items() if name != "file_digest"}
    for whole in (saved, old):
        path.write_text(json.dumps(whole))
        assert read_checkpoint(str(path.parent), run.engine.accountant).run == saved["run"]


@pytest.mark.slow
def test_a_generator_that_starts_again_is_warned_of(tmp_path: Path) -> None:
    trainer(tmp_path, arguments=SAVING).train()
    folder = str(tmp_path / "checkpoint-2")
    with pytest.warns(UserWarning, match="Restore the generator's state"):
        trainer(tmp_path).train(resume_from_checkpoint=folder)
    further = torch.Generator().manual_seed(NOISE_SEED)
    torch.rand(3, generator=further)
    for generator in (further, None):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="noise_generator")
            trainer(tmp_path, noise_generator=generator).train(resume_from_checkpoint=folder)


class SampledBatches:
    """A collator that keeps what was drawn."""

    def __init__(self) -> None:
        self.drawn: list = []

    def __call__(self, drawn: list) -> dict:
        self.drawn.append([row["input_ids"] for row in drawn])
        return pad(drawn)


@pytest.mark.slow
def test_a_second_run_draws_batches_of_its_own(tmp_path: Path) -> None:
    """With data_seed too; and a checkpoint of it goes on with its draws."""
    draws = SampledBatches()
    run = trainer(tmp_path, bert(), data_collator=draws, arguments=SAVING)
    run.train()
    first, draws.drawn = draws.drawn[-STEPS:], []
    run.train()
    second, draws.drawn = draws.drawn[-STEPS:], []
    assert not any(batch in first for batch in second)
    again = trainer(tmp_path, bert(), data_collator=draws)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert draws.drawn[-2:] == second[-2:]


@pytest.mark.slow
def test_no_two_runs_of_an_engine_draw_the_same_batches(tmp_path: Path) -> None:
    """Its ledger counts both, as if their draws were independent."""
    draws = SampledBatches()
    run = trainer(tmp_path, bert(), data_collator=draws, arguments=SAVING)
    run.train()
    first, draws.drawn = draws.drawn[-STEPS:], []
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert not any(batch in first for batch in draws.drawn[-(STEPS - 2) :])
    draws.drawn = []
    trainer(tmp_path, bert(), data_collator=draws, engine=run.engine).train()
    assert not any(batch in first for batch in draws.drawn[-STEPS:])


@pytest.mark.slow
def test_another_rate_goes_on_with_new_batches(tmp_path: Path) -> None:
    """With half the batch as many steps are fewer epochs, whose draws would come again."""
    trainer(tmp_path, bert(), arguments=SAVING).train()
    for batch, number in ((8, 0), (4, 4)):
        run = trainer(tmp_path, bert(), batch)
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        assert run.run_number == number


def test_skipping_no_data_would_repeat_draws(tmp_path: Path) -> None:
    with refused("Omit either"):
        trainer(tmp_path, arguments={"ignore_data_skip": True})
    trainer(tmp_path, arguments={"ignore_data_skip": True, "data_seed": None})


def test_the_environment_and_later_changes_are_checked(tmp_path: Path, monkeypatch) -> None:
    class Change(hf.TrainerCallback):
        def __init__(self, **changes) -> None:
            self.changes = changes

        def on_step_begin(self, args, state, control, **kwargs) -> None:
            vars(args).update(self.changes)

    for changes, way_out in (
        ({"gradient_accumulation_steps": 2}, "before you create the trainer"),
        ({"max_grad_norm": 1.0}, "per_sample_max_grad_norm"),
    ):
        run = trainer(tmp_path)
        run.add_callback(Change(**changes))
        with refused(way_out):
            run.train()
        assert run.engine.accountant.history == []
    for name, value in (("MIXED_PRECISION", "fp16"), ("DYNAMO_BACKEND", "EAGER")):
        with monkeypatch.context() as environment:
            environment.setenv(f"ACCELERATE_{name}", value)
            with refused(f"ACCELERATE_{name}"):
                trainer(tmp_path)
    run = trainer(tmp_path)
    run.accelerator = SimpleNamespace(distributed_type=SimpleNamespace(value="DEEPSPEED"))
    with refused("configured to train with DEEPSPEED"):
        check_still_private(run)


@pytest.mark.parametrize(
    ("told", "trap"),
    [
        ({"target_delta": 0.5}, "larger than 1 / N"),
        ({"poisson_sampling": False}, "every sample in every pass"),
    ],
)
@pytest.mark.one_in(2)
def test_traps_are_warned_of(tmp_path: Path, told: dict, trap: str) -> None:
    with pytest.warns(UserWarning, match=trap):
        trainer(tmp_path, privacy=told, arguments={"max_steps": 1}).train()

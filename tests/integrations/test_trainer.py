"""transformers.Trainer: the same weights as a hand-written loop, one release a logical batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from opacus.accountants import RDPAccountant

from fastclip import clipping
from fastclip.accounting import RandomAllocation
from tests.integrations.tiny import (
    BATCH,
    ROWS,
    bert,
    by_hand,
    furthest,
    gpt2,
    hf,
    integration,
    pad_tokens,
    rows,
    trainer,
    weights,
)
from tests.oracle import Batch, clipped_sum, norms, per_sample_gradients, relative_error

STEPS = 2 * ROWS // BATCH


@pytest.mark.parametrize(("physical", "accumulation"), [(8, 1), (4, 2), (2, 4)])
@pytest.mark.one_in(3)
def test_the_trainer_is_the_loop_by_hand(tmp_path: Path, physical: int, accumulation: int) -> None:
    """Same draws, same noise, same schedule: with and without physical batches."""
    mine, theirs = bert(), bert()
    engine = by_hand(theirs, physical)
    run = trainer(tmp_path, mine, physical, accumulation)
    run.train()
    assert furthest(weights(mine), weights(theirs)) < 1e-6
    assert furthest(weights(mine), weights(bert())) > 1e-2
    assert run.engine.accountant.history == engine.accountant.history


@pytest.mark.slow
def test_accumulation_changes_nothing(tmp_path: Path) -> None:
    """A logical batch is clipped row by row and released once, however it is cut."""
    whole, cut = bert(), bert()
    first, second = trainer(tmp_path, whole, 8, 1), trainer(tmp_path, cut, 2, 4)
    first.train()
    second.train()
    assert furthest(weights(whole), weights(cut)) < 1e-6
    assert first.state.global_step == second.state.global_step == STEPS
    assert [entry["step"] for entry in second.state.log_history] == [*range(1, STEPS + 1), STEPS]


@pytest.mark.slow
def test_one_optimizer_and_scheduler_step_a_release(tmp_path: Path) -> None:
    run = trainer(tmp_path, physical=2, accumulation=4)
    run.train()
    assert run.lr_scheduler.last_epoch == STEPS
    assert sum(steps for _, _, steps in run.engine.accountant.history) == STEPS
    (state,) = {int(s["step"]) for s in run.dp_optimizer.original_optimizer.state.values()}
    assert state == STEPS


def test_epsilon_is_that_of_the_schedule(tmp_path: Path) -> None:
    """Logged at every step, and equal to an accountant that is stepped alone."""
    run = trainer(tmp_path)
    run.train()
    accountant, expected = RDPAccountant(), []
    for _ in range(STEPS):
        accountant.step(noise_multiplier=1.0, sample_rate=BATCH / ROWS)
        expected.append(accountant.get_epsilon(1e-3))
    logged = [entry["epsilon"] for entry in run.state.log_history]
    assert logged == pytest.approx([*expected, expected[-1]])
    assert not any("grad_norm" in entry for entry in run.state.log_history)


@pytest.mark.parametrize("arguments", [{}, {"max_steps": 4, "num_train_epochs": 3}])
@pytest.mark.one_in(2)
def test_a_budget_is_kept(tmp_path: Path, arguments: dict) -> None:
    run = trainer(tmp_path, privacy={"target_epsilon": 6.0}, arguments=arguments)
    run.train()
    assert 5.9 <= run.epsilon() <= 6.0


def test_the_saved_model_is_the_plain_model(tmp_path: Path) -> None:
    """No prefix, no hook left: it loads, and its layers are ordinary."""
    model = bert()
    run = trainer(tmp_path, model)
    run.train()
    run.save_model(str(tmp_path / "saved"))
    loaded = hf.BertForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert furthest(weights(model), weights(loaded)) == 0
    assert not any("forward" in module.__dict__ for module in model.modules())
    batch = {"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([1])}
    model(**batch).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    ("stop", "strategy"), [(2, "flat"), (3, "flat"), (2, "soft_ada_clip"), (2, "sad_dpsgd")]
)
@pytest.mark.one_in(4)
def test_a_resumed_run_goes_on(tmp_path: Path, stop: int, strategy: str) -> None:
    """In the middle of an epoch and at its end: weights, thresholds, learning rate, accountant."""
    told = {"clipping": "flat"}
    if strategy != "flat":
        options = {"total_steps": STEPS} if strategy == "sad_dpsgd" else {}
        told = {"clipping": getattr(clipping, strategy)(**options)}
    saving = {"save_strategy": "steps", "save_steps": stop}
    whole, cut = bert(), bert()
    noise = torch.Generator().manual_seed(5)
    uncut = trainer(tmp_path / "a", whole, 4, 2, told, saving, noise_generator=noise)
    states = []
    uncut.add_callback(Watch(stop, lambda: states.append(noise.get_state())))
    uncut.train()
    again = torch.Generator()
    again.set_state(states[0])  # the noise of a checkpoint is never saved: the test restores it
    resumed = trainer(tmp_path / "a", cut, 4, 2, told, saving, noise_generator=again)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / f"checkpoint-{stop}"))
    assert furthest(weights(whole), weights(cut)) < 1e-6
    assert resumed.state.global_step == STEPS
    assert resumed.engine.accountant.history == uncut.engine.accountant.history
    assert resumed.dp_optimizer.threshold == uncut.dp_optimizer.threshold


class Watch(hf.TrainerCallback):
    """Calls `fn` after one step."""

    def __init__(self, step: int, fn) -> None:
        self.step, self.fn = step, fn

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if state.global_step == self.step:
            self.fn()


@pytest.mark.slow
def test_a_checkpoint_foretells_no_noise(tmp_path: Path) -> None:
    """Noise comes neither from the seed, which is 42 by default, nor from the saved states."""
    runs = [bert(), bert()]
    for number, model in enumerate(runs):
        trainer(tmp_path / str(number), model, noise_generator=None).train()
    assert furthest(weights(runs[0]), weights(runs[1])) > 1e-3


@pytest.mark.slow
def test_the_spent_budget_is_in_the_checkpoint(tmp_path: Path) -> None:
    run = trainer(tmp_path, arguments={"save_strategy": "epoch"})
    run.train()
    saved = json.loads((tmp_path / "checkpoint-3" / "privacy_accountant.json").read_text())
    assert saved["history"] == [[1.0, pytest.approx(1 / 3), 3]]
    assert saved["mechanism"] == "rdp"


def test_an_empty_batch_is_a_step_of_noise(tmp_path: Path) -> None:
    """Nobody is drawn: weights move by noise alone, and the step is accounted."""
    model = bert()
    run = trainer(tmp_path, model, arguments={"max_steps": 3})
    loader = run._make_private

    def nobody(plain):
        private = loader(plain)
        private.batch_sampler.sample_rate = 0.0
        return private

    run._make_private = nobody
    sums = []
    run.add_callback(Sums(model, sums))
    run.train()
    assert all(not total.any() for total in sums)
    assert run.engine.accountant.history == [(1.0, pytest.approx(1 / 3), 3)]
    assert furthest(weights(model), weights(bert())) > 1e-3
    assert [entry["loss"] for entry in run.state.log_history[:-1]] == [0.0, 0.0, 0.0]


class Sums(hf.TrainerCallback):
    """Keeps the clipped sums that each step is about to release."""

    def __init__(self, model, found: list) -> None:
        self.model, self.found = model, found

    def on_pre_optimizer_step(self, args, state, control, **kwargs) -> None:
        trained = (p for p in self.model.parameters() if p.requires_grad)
        self.found += [p.summed_grad.clone() for p in trained]


@pytest.mark.slow
def test_evaluation_is_the_plain_model_s(tmp_path: Path) -> None:
    """In the middle of training and after it, on batches of its own size."""
    model = bert()
    run = trainer(
        tmp_path, model, arguments={"eval_strategy": "epoch", "per_device_eval_batch_size": 5},
        eval_dataset=rows(7), privacy={"group_column": "group"},
        compute_metrics=lambda found: {"accuracy": (found[0].argmax(1) == found[1]).mean()},
    )  # fmt: skip
    run.train()
    during = [entry for entry in run.state.log_history if "eval_loss" in entry]
    after = run.evaluate()
    assert len(during) == 2
    assert after["eval_loss"] == pytest.approx(during[-1]["eval_loss"])
    assert after["eval_accuracy"] == during[-1]["eval_accuracy"]


@pytest.mark.slow
def test_training_twice_adds_up(tmp_path: Path) -> None:
    run = trainer(tmp_path)
    run.train()
    run.train()
    assert sum(steps for _, _, steps in run.engine.accountant.history) == 2 * STEPS


@pytest.mark.parametrize("strategy", [clipping.dpsgd_f(2), clipping.bounded_adaptive(0.1)])
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.one_in(4)
def test_groups_come_from_a_column(tmp_path: Path, strategy, workers: int) -> None:
    run = trainer(
        tmp_path, privacy={"clipping": strategy, "group_column": "group"},
        arguments={"dataloader_num_workers": workers},
    )  # fmt: skip
    run.train()
    assert run.state.global_step == STEPS


def test_secure_mode(tmp_path: Path) -> None:
    run = trainer(tmp_path, physical=4, accumulation=2, privacy={"secure_mode": True})
    run.train()
    assert run.dp_optimizer.noise_source.secure
    assert run.state.global_step == STEPS


@pytest.mark.slow
def test_bfloat16(tmp_path: Path) -> None:
    model = bert()
    trainer(tmp_path, model, arguments={"bf16": True}).train()
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert not any(
        "forward" in m.__dict__ or "_original_forward" in m.__dict__ for m in model.modules()
    )


@pytest.mark.slow
def test_gradient_checkpointing(tmp_path: Path) -> None:
    whole, cut = bert(), bert()
    trainer(tmp_path, whole).train()
    trainer(tmp_path, cut, arguments={"activation_checkpointing": True}).train()
    assert furthest(weights(whole), weights(cut)) < 1e-6


def test_a_language_model_is_averaged_row_by_row(tmp_path: Path) -> None:
    """Rows of 4 to 10 tokens: sums equal those of one row at a time, whatever the others' lengths."""
    model, sums = gpt2(), []
    run = trainer(
        tmp_path, model, arguments={"max_steps": 1, "logging_steps": 5}, data_collator=pad_tokens,
        privacy={"poisson_sampling": False},
    )  # fmt: skip
    drawn = []
    run.data_collator = lambda batch: drawn.append(batch) or pad_tokens(batch)
    run.add_callback(Sums(model, sums))
    start = gpt2()
    run.train()
    batch = pad_tokens([{k: v for k, v in row.items() if k != "group"} for row in drawn[0]])
    labels = batch.pop("labels")

    def own(output, labels):
        losses = F.cross_entropy(
            output.logits[:, :-1].transpose(1, 2), labels[:, 1:], reduction="none"
        )
        return losses.sum(1) / (labels[:, 1:] != -100).sum(1)

    grads = per_sample_gradients(start, Batch(kwargs=batch, target=labels), own)
    assert norms(grads).max() > 0.5
    found = dict(zip([name for name, _ in model.named_parameters()], sums, strict=True))
    assert relative_error(found, clipped_sum(grads, 0.5)) < 1e-5


def test_a_random_allocation(tmp_path: Path) -> None:
    """Each row once in every epoch, which is recorded as a whole."""
    run = trainer(
        tmp_path, privacy={"sampling": "allocation", "accountant": "prv"},
        arguments={"num_train_epochs": 2, "max_steps": -1},
    )  # fmt: skip
    run.train()
    steps = run.state.max_steps // 2
    assert run.engine.accountant.history == [(1.0, RandomAllocation(steps), 2)]


def test_label_smoothing_is_the_trainer_s(tmp_path: Path) -> None:
    """On classes without padding it equals transformers' own."""
    from transformers.trainer_pt_utils import LabelSmoother

    run, pairs = trainer(tmp_path, arguments={"label_smoothing_factor": 0.1, "max_steps": 1}), []
    plain = run._training_loss

    def noted(model, inputs):
        loss, outputs = plain(model, inputs)
        pairs.append((loss.item(), LabelSmoother(0.1)(outputs, inputs["labels"]).item()))
        return loss, outputs

    run._training_loss = noted
    run.train()
    assert [found for found, _ in pairs] == pytest.approx([own for _, own in pairs])
    assert pairs


@pytest.mark.slow
def test_a_loss_of_the_users_own(tmp_path: Path) -> None:
    """One loss a row, or its mean."""
    results = []
    for own in (
        lambda out, labels, num_items_in_batch=None: F.cross_entropy(
            out.logits, labels, reduction="none"
        ),
        lambda out, labels, num_items_in_batch=None: F.cross_entropy(out.logits, labels),
    ):
        model = bert()
        trainer(tmp_path, model, compute_loss_func=own).train()
        results.append(weights(model))
    plain = bert()
    trainer(tmp_path, plain).train()
    assert furthest(results[0], results[1]) < 1e-6
    assert furthest(results[0], weights(plain)) < 1e-6


def test_training_arguments_are_the_user_s_own(tmp_path: Path) -> None:
    """The trainer changes a copy."""
    arguments = hf.TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=4, use_cpu=True
    )
    privacy = integration.PrivacyArguments(1.0, 1e-3, noise_multiplier=1.0)
    run = integration.PrivateTrainer(bert(), arguments, train_dataset=rows(), privacy=privacy)
    assert (arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps) == (2, 4)
    assert (run.args.per_device_train_batch_size, run.physical_batch_size) == (8, 2)
    assert run.get_train_dataloader().batch_size == 8


@pytest.mark.slow
@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.one_in(2)
def test_an_optimizer_of_the_users_own(tmp_path: Path, resume: bool) -> None:
    """Made anew whenever it is asked for, it trains as one that was passed."""

    class Own(integration.PrivateTrainer):
        def create_optimizer(self, *args):
            self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1, momentum=0.9)
            return self.optimizer

    passed, made = bert(), bert()
    given = torch.optim.SGD(passed.parameters(), 0.1, momentum=0.9)
    trainer(tmp_path, passed, optimizers=(given, None)).train()
    saving = {"save_strategy": "steps", "save_steps": STEPS}
    run = trainer(tmp_path, made, kind=Own, arguments=saving)
    run.train()
    assert type(run.dp_optimizer.original_optimizer) is torch.optim.SGD
    assert furthest(weights(made), weights(passed)) < 1e-6
    assert run.engine.accountant.history == [(1.0, pytest.approx(1 / 3), STEPS)]
    if resume:
        again = trainer(tmp_path, kind=Own, arguments={"num_train_epochs": 3}, noise_generator=None)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS}"))
        (state,) = {len(s) for s in again.dp_optimizer.original_optimizer.state.values()}
        assert state == 1  # its momentum went on
        assert again.state.global_step == STEPS + STEPS // 2

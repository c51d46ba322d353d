"""Resumed runs keep their budget, whatever was changed in between, or are refused."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from fastclip import FastPrivacyEngine, clipping
from fastclip.accounting import find_noise_multiplier
from fastclip.engine import run as inspection
from tests.integrations import test_lightning as lightning
from tests.integrations.test_spent import SAVING, STEPS, taken
from tests.integrations.tiny import trainer
from tests.refusal import refused

TARGET = 6.0
BUDGET = {"target_epsilon": TARGET, "target_delta": 1e-3}
STAGED = {"clipping": clipping.sad_dpsgd(STEPS, stages=3, noise_decay=0.5, length_decay=0.5)}
MODEL_ONLY = {**SAVING, "save_only_model": True}


@pytest.fixture(scope="module", autouse=True)
def searched_once():
    """The same noise is asked for again and again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspection, "find_noise_multiplier", cache(find_noise_multiplier))
        yield


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Path:
    """Of a run that keeps its budget of two epochs."""
    folder = tmp_path_factory.mktemp("planned")
    trainer(folder, privacy=BUDGET, arguments=SAVING).train()
    return folder


def resume(folder: Path, step: int = 2, **told):
    run = trainer(folder, noise_generator=None, **told)
    run.train(resume_from_checkpoint=str(folder / f"checkpoint-{step}"))
    return run


@pytest.mark.slow
def test_a_resumed_run_of_stages_keeps_its_budget(tmp_path: Path) -> None:
    trainer(tmp_path, privacy=BUDGET | STAGED, arguments=SAVING).train()
    run = resume(tmp_path, privacy=BUDGET | STAGED)
    assert TARGET - 0.1 <= run.epsilon() <= TARGET
    assert taken(run) == STEPS


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "after",
    [
        {"arguments": {"num_train_epochs": 4}},
        {"arguments": {"max_steps": STEPS + 1}},
        {"physical": 4},
        {"privacy": {"target_epsilon": TARGET / 2}},
    ],
)
def test_a_run_that_would_exceed_it_is_refused(planned: Path, after: dict) -> None:
    told = {**after, "privacy": BUDGET | after.get("privacy", {})}
    run = trainer(planned, **told)
    with refused("above target_epsilon.*pass noise_multiplier="):
        run.train(resume_from_checkpoint=str(planned / "checkpoint-2"))
    assert taken(run) == 2  # the model has the checkpoint's weights, and no step was taken


def test_a_second_run_under_one_budget_is_refused(tmp_path: Path) -> None:
    """Of the same trainer, or of another one of the engine, before its first step."""
    first = trainer(tmp_path, privacy=BUDGET)
    first.train()
    spent, before = first.epsilon(), {k: v.clone() for k, v in first.model.state_dict().items()}
    assert spent <= TARGET
    for run in (first, trainer(tmp_path, first.model, privacy=BUDGET, engine=first.engine)):
        with (
            pytest.warns(UserWarning, match="plans as if nothing was spent"),
            refused("above target_epsilon=6. Raise target_epsilon, or pass noise_multiplier="),
        ):
            run.train()
    assert taken(first) == STEPS
    assert first.epsilon() == spent
    assert all(torch.equal(v, before[k]) for k, v in first.model.state_dict().items())


@pytest.mark.slow
def test_noise_that_is_given_is_no_budget(planned: Path) -> None:
    saved = json.loads((planned / "checkpoint-2" / "privacy_accountant.json").read_text())
    told = {"noise_multiplier": saved["noise_multiplier"]}
    assert resume(planned, privacy=told, arguments={"num_train_epochs": 3}).epsilon() > TARGET


@pytest.mark.slow
def test_a_run_under_a_larger_budget_goes_on(planned: Path) -> None:
    larger = {"target_epsilon": 8.0, "target_delta": 1e-3}
    assert TARGET < resume(planned, privacy=larger).epsilon() <= 8.0


@pytest.mark.slow
def test_a_ledger_that_holds_more_than_the_checkpoint_counts(tmp_path: Path) -> None:
    """The same trainer set back: the steps since then were taken."""
    run = trainer(tmp_path, privacy=BUDGET, arguments=SAVING)
    run.train()
    with (
        pytest.warns(UserWarning, match="plans as if nothing was spent"),
        refused("target_epsilon="),
    ):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert taken(run) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [BUDGET, {"noise_multiplier": 1.0}])
@pytest.mark.one_in(2)
def test_stages_and_thresholds_do_not_begin_again(tmp_path: Path, privacy: dict) -> None:
    """A checkpoint of the model alone does not hold them."""
    trainer(tmp_path, privacy=privacy | STAGED, arguments=MODEL_ONLY).train()
    with refused("save_only_model"):
        resume(tmp_path, privacy=privacy | STAGED)
    with refused("another strategy"):
        resume(tmp_path, privacy=privacy | {"clipping": "adaptive"})


@pytest.mark.slow
def test_a_constant_strategy_needs_nothing_but_the_ledger(tmp_path: Path) -> None:
    trainer(tmp_path, privacy=BUDGET, arguments=MODEL_ONLY).train()
    assert not (tmp_path / "checkpoint-2" / "optimizer.pt").exists()
    run = resume(tmp_path, privacy=BUDGET)
    assert taken(run) == STEPS
    assert TARGET - 0.1 <= run.epsilon() <= TARGET


@pytest.mark.slow
def test_two_resumed_runs_are_joined_by_name(tmp_path: Path) -> None:
    """What a third trainer loads of both counts the trunk once and both branches."""
    trainer(tmp_path / "trunk", arguments=SAVING).train()
    runs = [resume(tmp_path / "trunk", arguments=SAVING) for _ in range(2)]
    accountant = rdp().accountant
    for run in runs:
        state = json.dumps(run.engine.accountant.state_dict())
        accountant.load_state_dict(json.loads(state))
    assert sum(n for *_, n in accountant.history) == 2 + 2 * (STEPS - 2)


# Lightning


def lit(folder: Path, private: FastPrivacyEngine, told: dict, epochs: int, resumed=None, **options):
    callbacks = [lightning.integration.PrivacyCallback(private, delta=1e-3)]
    fitter = lightning.pl.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        **({"callbacks": callbacks} | options),
    )  # fmt: skip
    data = lightning.integration.DPLightningDataModule(lightning.Data())
    model = lightning.Classifier(private, **told)
    fitter.fit(model, datamodule=data, ckpt_path=resumed, weights_only=False if resumed else None)
    fitter.save_checkpoint(folder / "saved.ckpt")
    return folder / "saved.ckpt"


def rdp() -> FastPrivacyEngine:
    return FastPrivacyEngine(accountant="rdp")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("without", ["before", "after", "other engine"])
def test_lightning_without_a_ledger_is_refused(tmp_path: Path, without: str) -> None:
    private, told = rdp(), {"noise_multiplier": 1.0}
    path = lit(tmp_path, rdp(), told, 2, **({"callbacks": []} if without == "before" else {}))
    options = {"callbacks": []} if without == "after" else {}
    if without == "other engine":
        options = {"callbacks": [lightning.integration.PrivacyCallback(rdp(), delta=1e-3)]}
    with refused("the privacy cost of its run is unknown"):
        lit(tmp_path, private, told, 3, path, **options)
    assert private.accountant.history == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("epochs", "after", "fits"),
    [
        (2, {}, True),
        (4, {}, False),
        (4, {"epochs": 2}, False),
        (2, {"target_epsilon": 5.0}, False),
        (4, {"noise_multiplier": 1.0}, True),
    ],
)
@pytest.mark.one_in(6)
def test_lightning_keeps_its_budget(tmp_path: Path, epochs: int, after: dict, fits: bool) -> None:
    """Cut after one of two epochs, and gone on with."""
    private = rdp()
    path = lit(tmp_path, rdp(), BUDGET | {"epochs": 2}, 1)
    told = after if "noise_multiplier" in after else BUDGET | after
    if not fits:
        with refused("above target_epsilon.*pass noise_multiplier="):
            lit(tmp_path, private, told, epochs, path)
        assert sum(n for *_, n in private.accountant.history) == 4
        return
    lit(tmp_path, private, told, epochs, path)
    assert sum(n for *_, n in private.accountant.history) == 4 * epochs
    if "target_epsilon" in told:
        assert TARGET - 0.1 <= private.get_epsilon(1e-3) <= TARGET

"""What engine.mechanism() says: of whom, and on whose word."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus.accountants import PRVAccountant
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from fastclip import FastPrivacyEngine, clipping
from fastclip.accounting import strongest_attack
from fastclip.accounting.attack import PRIORS, RATES
from fastclip.clipping import Clipping, Hard
from fastclip.errors import ArgumentError, StepError
from tests.refusal import refused

N, D = 12, 3
PUBLIC = {"sample_rate": 0.25, "expected_batch_size": 3.0}
UNITS = {**PUBLIC, "unit_ids": [row // 3 for row in range(N)]}


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.ones(N, D)

    def __len__(self) -> int:
        return N


def private(engine: FastPrivacyEngine, loader: DataLoader | None = None, **options: Any) -> tuple:
    model = nn.Linear(D, 1)
    return engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=loader or DataLoader(TensorDataset(torch.ones(N, D)), batch_size=4),
        noise_multiplier=1.0, max_grad_norm=1.0, **options,
    )  # fmt: skip


def train(made: tuple) -> None:
    model, optimizer, loader = made
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(("before", "after"), [({}, UNITS), (UNITS, {})], ids=["rows", "units"])
def test_rows_and_units_have_no_epsilon_in_common(before: dict, after: dict) -> None:
    engine = FastPrivacyEngine()
    train(private(engine, **before))
    taken = list(engine.accountant.history)
    with refused("Use one FastPrivacyEngine", ArgumentError):
        private(engine, **after)
    assert engine.accountant.history == taken


@pytest.mark.parametrize("mode", ["fast", "hooks"])
def test_steps_that_protect_another_unit_are_refused(mode: str) -> None:
    """Both models were made private before the first step of either."""
    engine = FastPrivacyEngine()
    rows, units = private(engine, grad_sample_mode=mode), private(engine, **UNITS)
    train(units)
    taken = list(engine.accountant.history)
    with refused("Use one FastPrivacyEngine", ArgumentError):
        train(rows)
    assert engine.accountant.history == taken


@pytest.mark.parametrize("how", ["checkpoint", "accountant", "Opacus"])
def test_steps_of_an_earlier_run_say_whom_they_protect(how: str, tmp_path: Path) -> None:
    """Rows' steps that are loaded, or brought by an accountant, are none of a unit's epsilon."""
    earlier, engine = FastPrivacyEngine(), FastPrivacyEngine()
    made = private(earlier)
    train(made)
    later = private(engine, **UNITS)
    with refused("Use one FastPrivacyEngine", ArgumentError):
        if how == "checkpoint":
            earlier.save_checkpoint(path=tmp_path / "run.pt", module=made[0], optimizer=made[1])
            engine.load_checkpoint(path=tmp_path / "run.pt", module=later[0], optimizer=later[1])
        elif how == "accountant":
            engine.accountant = earlier.accountant
        else:
            state = PRVAccountant().state_dict() | {"history": list(earlier.accountant.history)}
            engine.accountant.load_state_dict(state)
        train(later)


def test_a_checkpoint_of_a_run_whose_size_shows(tmp_path: Path) -> None:
    earlier, engine = FastPrivacyEngine(), FastPrivacyEngine()
    made, later = private(earlier), private(engine, **PUBLIC)
    train(made)
    assert "added or removed" in engine.mechanism().neighbors
    earlier.save_checkpoint(path=tmp_path / "run.pt", module=made[0], optimizer=made[1])
    engine.load_checkpoint(path=tmp_path / "run.pt", module=later[0], optimizer=later[1])
    assert "zero-out" in engine.mechanism().neighbors


def test_units_go_on_from_their_own_checkpoint(tmp_path: Path) -> None:
    earlier, engine = FastPrivacyEngine(), FastPrivacyEngine()
    made, later = private(earlier, **UNITS), private(engine, **UNITS)
    train(made)
    earlier.save_checkpoint(path=tmp_path / "run.pt", module=made[0], optimizer=made[1])
    engine.load_checkpoint(path=tmp_path / "run.pt", module=later[0], optimizer=later[1])
    train(later)
    assert sum(steps for *_, steps in engine.accountant.history) == 2 * engine.sampling.steps
    assert "added or removed" in engine.mechanism().neighbors


@pytest.mark.parametrize(
    "saved", [{"units": ["patient"], "size_is_secret": True}, {"units": []}, 3]
)
def test_a_damaged_checkpoint(saved: Any) -> None:
    state = FastPrivacyEngine().accountant.state_dict() | {"fastclip_protected": saved}
    with refused("its digest belongs to other steps", ArgumentError):
        FastPrivacyEngine().accountant.load_state_dict(state)
    del state["fastclip_digest"]
    with refused("fastclip_protected of the saved accountant is damaged", ArgumentError):
        FastPrivacyEngine().accountant.load_state_dict(state)


def test_a_run_of_a_public_size_beside_one_whose_size_shows() -> None:
    engine = FastPrivacyEngine()
    train(private(engine))
    private(engine, **PUBLIC)
    found = engine.mechanism()
    assert "zero-out" in found.neighbors
    assert found.units == N
    assert any("N = 12, on which other steps in epsilon depend" in line for line in found.trusted)
    assert FastPrivacyEngine().accountant.history == []  # and another engine starts anew


def test_cut_draws_tell_the_number_of_rows() -> None:
    pytest.importorskip("dp_accounting")
    engine = FastPrivacyEngine(accountant="pld")
    private(engine, max_batch_size=4, **PUBLIC)
    found = engine.mechanism()
    assert found.public_size
    assert found.units == N
    assert (
        "N = 12, on which the cost of truncated batches depends, is public knowledge"
        in found.trusted
    )


WEIGHTED = WeightedRandomSampler([1.0] * 6 + [0.5] * 6, N)
ROWS = TensorDataset(torch.ones(N, D))


@pytest.mark.parametrize(
    ("loader", "options", "line"),
    [
        (DataLoader(ROWS, 4, shuffle=True), {"poisson_sampling": False}, None),
        (DataLoader(ROWS, 4), {"poisson_sampling": False}, "the order of samples"),
        (
            DataLoader(ROWS, 4, sampler=list(range(N))),
            {"poisson_sampling": False},
            "the order of samples",
        ),
        (
            DataLoader(Stream(), 4),
            {"poisson_sampling": False},
            "a sample is in a step at most once",
        ),
        (DataLoader(ROWS, 4), {}, None),
        (DataLoader(ROWS, 4, sampler=WEIGHTED), {}, "is public, as the weights are"),
        (DataLoader(ROWS, 4, sampler=WEIGHTED), PUBLIC, "depends on no other sample"),
    ],
)
def test_what_is_trusted_of_the_draws(loader: DataLoader, options: dict, line: str | None) -> None:
    """An order that is drawn here needs no trust; one that the user's sampler makes does."""
    engine = FastPrivacyEngine()
    private(engine, loader, **options)
    told = ("order of samples", "at most once", "the sampling rate of a sample")
    of_draws = [t for t in engine.mechanism().trusted if any(part in t for part in told)]
    assert len(of_draws) == (line is not None)
    assert line is None or line in of_draws[0]


@pytest.mark.parametrize("epochs", [0, -1.0, float("nan"), float("inf")])
def test_a_length_that_is_none(epochs: float) -> None:
    engine = FastPrivacyEngine()
    private(engine)
    with refused("epochs expects a positive"):
        engine.mechanism(epochs=epochs)


def test_a_plan_of_many_steps() -> None:
    """Billions of steps of one kind are one entry."""
    engine = FastPrivacyEngine()
    private(engine)
    assert engine.mechanism(epochs=1e9).planned == ((1.0, 1 / 3, 3 * 10**9),)


# What an attacker can do


def test_the_bounds_on_any_attack() -> None:
    engine = FastPrivacyEngine(accountant="rdp")  # whose epsilons are looser than the curve
    made = private(engine, **PUBLIC)
    train(made)
    found = engine.mechanism(delta=1e-3, epochs=3)
    for attack, entries in ((found.attack, found.taken), (found.planned_attack, found.planned)):
        assert attack.as_json() == strongest_attack(entries, 1e-3).as_json()
        assert list(attack.true_positive_rates) == list(RATES)
        assert list(attack.reconstruction) == list(PRIORS)
    plain = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert plain["attack"] == found.attack.as_json()
    assert plain["planned_attack"] == found.planned_attack.as_json()
    said = str(found)
    for attack, which in ((found.attack, "recorded"), (found.planned_attack, "planned")):
        sentences = "\n".join(f"  - {each}" for each in attack.sentences())
        assert f"bounds on any attack, for the steps {which}:\n{sentences}\n" in said
    assert "whether this sample is in the data finds" in said


def test_the_bounds_need_neither_delta_nor_steps() -> None:
    engine = FastPrivacyEngine()
    private(engine, **UNITS)
    found = engine.mechanism()
    assert found.planned_attack is None
    assert found.attack.advantage == 0
    assert found.as_json()["planned_attack"] is None
    assert "whether this unit is in the data finds at most 0.1% of the units" in str(found)
    planned = str(engine.mechanism(epochs=1))
    assert "bounds on any attack, for the steps planned" in planned
    assert "for the steps recorded:" not in planned


def test_a_public_size_bounds_what_a_sample_contributes() -> None:
    engine = FastPrivacyEngine()
    train(private(engine))
    found = engine.mechanism()
    assert "whether this sample contributes to the training finds" in str(found)
    assert 0 < found.attack.advantage < 1


def test_truncated_batches_have_bounds() -> None:
    pytest.importorskip("dp_accounting")
    engine = FastPrivacyEngine(accountant="pld")
    train(private(engine, max_batch_size=4, **PUBLIC))
    found = engine.mechanism(delta=1e-5).attack
    uncut = [(sigma, rate.rate, steps) for sigma, rate, steps in engine.accountant.history]
    assert found.advantage > strongest_attack(uncut).advantage


# At what the next step's noise is scaled


def adaptive(engine: FastPrivacyEngine) -> tuple:
    return private(engine, clipping=clipping.adaptive(threshold_lr=2.0), poisson_sampling=False)


def test_the_sensitivity_is_that_of_the_next_step() -> None:
    engine = FastPrivacyEngine()
    made = adaptive(engine)
    model, optimizer, loader = made
    scaled = []
    optimizer.attach_step_hook(lambda o: scaled.append(float(o.sensitivity)))
    optimizer.max_grad_norm = 7.0
    for (x,) in loader:
        optimizer.zero_grad()
        said = [engine.mechanism().sensitivity]
        model(x).sum().backward()
        said.append(engine.mechanism().sensitivity)
        optimizer.step()
        assert said == [scaled[-1]] * 2
    assert scaled[0] == 7.0
    assert len(set(scaled)) == len(scaled) > 1


def test_a_threshold_that_is_set_too_late_for_this_batch() -> None:
    engine = FastPrivacyEngine()
    model, optimizer, _ = adaptive(engine)
    model(torch.ones(4, D)).sum().backward()
    optimizer.max_grad_norm = 7.0
    assert engine.mechanism().sensitivity == 1.0
    optimizer.zero_grad()
    assert engine.mechanism().sensitivity == 7.0


def from_optimizer(earlier: Any, made: tuple, engine: Any, later: tuple) -> None:
    later[1].load_state_dict(made[1].state_dict())


def from_run_state(earlier: Any, made: tuple, engine: Any, later: tuple) -> None:
    state = earlier.run_state(module=made[0], optimizer=made[1]).state_dict()
    engine.run_state(module=later[0], optimizer=later[1]).load_state_dict(state)


@pytest.mark.parametrize(
    ("load", "begun"), [(from_optimizer, False), (from_optimizer, True), (from_run_state, False)]
)
def test_a_state_that_was_loaded_is_shown(load: Any, begun: bool) -> None:
    earlier, engine = FastPrivacyEngine(), FastPrivacyEngine()
    train(made := adaptive(earlier))
    C = float(made[1].max_grad_norm)
    model, optimizer, _ = later = adaptive(engine)
    if begun:  # what was clipped at 1 has noise for 1
        model(torch.ones(4, D)).sum().backward()
    load(earlier, made, engine, later)
    expected = 1.0 if begun else C
    assert C != 1.0
    assert float(optimizer.max_grad_norm) == C
    assert engine.mechanism().sensitivity == expected
    assert float(optimizer.threshold) == float(optimizer.sensitivity) == expected


def test_a_model_of_opacus_modes() -> None:
    """It is there, but not known well enough for these questions."""
    engine, net = FastPrivacyEngine(accountant="rdp"), nn.Linear(4, 2)
    with refused("Call make_private first", StepError):
        _ = engine.sampling
    engine.make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), max_grad_norm=1.0,
        data_loader=DataLoader(TensorDataset(torch.zeros(8, 4)), 2), noise_multiplier=1.0,
        grad_sample_mode="hooks",
    )  # fmt: skip
    for ask in (lambda: engine.sampling, engine.mechanism, engine.plan):
        with refused("a private model in the fast mode.*without grad_sample_mode", StepError):
            ask()


class MyScale(Hard):
    """A scale function of the user's own."""


@pytest.mark.parametrize(
    ("strategy", "clipped", "noise"),
    [
        (Clipping(), "hard clipping, constant threshold", "constant noise"),
        (Clipping(MyScale()), "my scale clipping, constant threshold", "constant noise"),
        (
            clipping.adaptive(),
            "hard clipping, quantile threshold (counts samples below)", "constant noise",
        ),
        (
            clipping.sad_dpsgd(9),
            "hard clipping, staged threshold",
            "staged noise (total_steps=9, stages=3, decay=0.8, length_decay=0.9)",
        ),
    ],
)  # fmt: skip
def test_a_summary_has_no_names_of_classes(
    strategy: Clipping, clipped: str, noise: str, tmp_path: Path
) -> None:
    """Printed, in JSON, and of a checkpoint of another strategy."""
    engine = FastPrivacyEngine()
    made = private(engine, clipping=strategy)
    found, text = engine.mechanism(), str(engine.mechanism())
    assert (found.clipping, found.schedule) == (clipped, noise)
    assert clipped in text
    assert noise in text
    assert not re.search(r"[a-z][A-Z]", text.partition("noise ")[0].partition("clipping ")[2])
    other = private(FastPrivacyEngine(), clipping=clipping.global_adapt(9.0))
    state = {**made[1].state_dict(), **other[1].state_dict()}
    if strategy.constant:
        with pytest.warns(UserWarning, match=f"this strategy .{re.escape(clipped)}"):
            made[1].load_state_dict(state)
        return
    with pytest.raises(ArgumentError, match=f"this strategy is {clipped.split(' (')[0]}") as caught:
        made[1].load_state_dict(state)
    assert not re.search(r"[a-z][A-Z]", str(caught.value))


def budgeted(engine: FastPrivacyEngine, **options: Any) -> tuple:
    model = nn.Linear(D, 1)
    return engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.ones(N, D)), batch_size=4),
        target_delta=1e-3, epochs=2, max_grad_norm=1.0, **{"target_epsilon": 5.0, **options},
    )  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"poisson_sampling": False}], ids=["Poisson", "passes"])
@pytest.mark.parametrize("falling", [False, True])
def test_noise_above_every_gradient_is_said(options: dict, falling: bool) -> None:
    """A fact of sigma / B: of the least noise of the run, if it changes."""
    noise = clipping.StepNoise(6, 6, 0.5) if falling else clipping.ConstantNoise()
    options = {**options, "clipping": Clipping(noise=noise)}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        budgeted(FastPrivacyEngine(), **options)
    with pytest.warns(UserWarning, match=r"^target_epsilon=0.01 needs sigma.*B = 4") as caught:
        made = budgeted(FastPrivacyEngine(), **{**options, "target_epsilon": 0.01})
    (text,) = (str(each.message) for each in caught)
    least = made[1].noise_multiplier * (0.5**5 if falling else 1)
    assert f"sigma = {least:.4g} " in text
    assert f"is {least / 4:.3g} (sigma / B) times" in text
    assert least > 4


@pytest.mark.parametrize("options", [{}, {"poisson_sampling": False}], ids=["Poisson", "passes"])
def test_a_run_longer_than_its_budget(options: dict) -> None:
    """Nothing is said within the plan, and the first step beyond it warns once."""
    engine = FastPrivacyEngine()
    made = budgeted(engine, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(2):
            train(made)
    assert engine.get_epsilon(1e-3) <= 5.0
    with pytest.warns(UserWarning, match="planned for target_epsilon.*privacy-budget") as caught:
        train(made)
    assert sum("planned for target_epsilon" in str(each.message) for each in caught) == 1
    assert engine.get_epsilon(1e-3) > 5.0


def test_a_resumed_run_longer_than_its_budget(tmp_path: Path) -> None:
    """Steps of the checkpoint count."""
    engine = FastPrivacyEngine()
    made = budgeted(engine)
    train(made)
    engine.save_checkpoint(path=tmp_path / "run.pt", module=made[0], optimizer=made[1])
    engine = FastPrivacyEngine()
    made = budgeted(engine)
    engine.load_checkpoint(path=tmp_path / "run.pt", module=made[0], optimizer=made[1])
    train(made)
    with pytest.warns(UserWarning, match="planned for target_epsilon"):
        train(made)


class Watched(list):
    """A history that counts how often all of it is read."""

    read = 0

    def __iter__(self) -> Any:
        self.read += 1
        return super().__iter__()


def test_a_step_within_its_budget_does_not_read_the_history() -> None:
    """A noise that changes in every step makes one entry per step."""
    found = []
    for make in (private, budgeted):
        engine = FastPrivacyEngine()
        made = make(engine, clipping=Clipping(noise=clipping.StepNoise(6, 6, 0.9)))
        train(made)
        engine.accountant.history = watched = Watched(engine.accountant.history)
        train(made)
        found.append(watched.read)
    assert found[0] == found[1]


def test_numbers_of_samples_of_units_are_trusted() -> None:
    """Without a stated rate, q is that of the loader, which counts samples."""
    engine = FastPrivacyEngine()
    private(engine, unit_ids=UNITS["unit_ids"])
    assert engine.mechanism().trusted[0].startswith("N = 4 units and the number of samples")
    engine = FastPrivacyEngine()
    private(engine, **UNITS)
    assert not any("number of samples" in line for line in engine.mechanism().trusted)

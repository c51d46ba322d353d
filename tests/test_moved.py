"""Old module paths: each gives what the new path has, and says where that is."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip._moved import COMMANDS, MOVED, NAMES, RENAMED, new_keywords, spec_of
from fastclip.errors import ArgumentTypeError
from fastclip.integrations.huggingface import PrivacyArguments
from fastclip.ops import planner
from fastclip.rules.use import UseBackward

PACKAGE = Path(__file__).resolve().parents[1] / "fastclip"
PUBLIC = {
    "layers": "register_rule", "layers.rule": "LayerRule", "uses": "register_rule",
    "uses.rule": "register_use", "uses.reductions": "ElementwiseUse",
    "uses.elementwise": "ElementwiseUse", "planner": "Planner", "noise": "SecureNoise",
    "model": "FastPrivacyEngine", "model.unwrapping": "unwrap", "optim": "FastPrivacyEngine",
    "optim.optimizer": "FastDPOptimizer", "optim.grad_scaler": "GradScaler",
    "mechanism": "Mechanism", "explanation": "Explanation",
    "integrations.arguments": "PrivacyArguments",
}  # fmt: skip
"""Of each old path a name that users import from it."""


def test_every_path_is_tried() -> None:
    assert PUBLIC.keys() == MOVED.keys()


@pytest.mark.parametrize(("old", "name"), PUBLIC.items())
def test_an_old_path_gives_what_the_new_one_has(
    old: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, f"fastclip.{old}", raising=False)
    with pytest.warns(DeprecationWarning, match=f"Import fastclip.{MOVED[old]}") as told:
        module = import_module(f"fastclip.{old}")
    assert getattr(module, name) is getattr(import_module(f"fastclip.{MOVED[old]}"), name)
    assert told[-1].filename == __file__


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_is_free(old: str) -> None:
    """Nothing lies there, so the alias is what is found."""
    place = PACKAGE / old.replace(".", "/")
    assert not place.with_suffix(".py").exists()
    assert not (place / "__init__.py").exists()


def test_other_paths_are_not_ours() -> None:
    assert spec_of("fastclip.nothing") is None
    with pytest.raises(ModuleNotFoundError, match="nothing"):
        import_module("fastclip.nothing")


@pytest.mark.parametrize(("old", "new"), NAMES.items())
def test_an_old_name_of_an_old_path(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "fastclip.planner", raising=False)
    with pytest.warns(DeprecationWarning, match=r"Import fastclip\.ops\.planner"):
        module = import_module("fastclip.planner")
    assert getattr(module, old) is getattr(planner, new)


@pytest.mark.parametrize(("place", "new"), RENAMED.items())
def test_an_old_name(place: tuple[str, str], new: str) -> None:
    module = import_module(place[0])
    with pytest.warns(DeprecationWarning, match=f"Use {new}"):
        assert getattr(module, place[1]) is getattr(module, new)
    with pytest.raises(AttributeError, match="nothing"):
        module.nothing  # noqa: B018


def test_an_old_keyword() -> None:
    """By all calls that take it, to the same design."""
    rows = TensorDataset(torch.randn(16, 2), torch.zeros(16, dtype=torch.int64))
    loader, ids = DataLoader(rows, batch_size=4), torch.arange(16) // 4
    engine, model = FastPrivacyEngine(), nn.Linear(2, 2)
    with pytest.warns(DeprecationWarning, match="Use max_samples_per_unit"):
        planned = engine.plan_sampling(loader, unit_ids=ids, max_rows_per_unit=2)
    assert planned.max_samples_per_unit == 2
    with pytest.warns(DeprecationWarning, match="Use max_samples_per_unit"):
        engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data_loader=loader,
            noise_multiplier=1.0, max_grad_norm=1.0, unit_ids=ids, max_rows_per_unit=2,
        )  # fmt: skip
    assert engine.sampling.max_samples_per_unit == 2
    with pytest.warns(DeprecationWarning, match="Use engine.sample_epsilon"):
        assert engine.row_epsilon(1e-3, 0.25) == engine.sample_epsilon(1e-3, 0.25)
    claim = engine.mechanism()
    with pytest.warns(DeprecationWarning, match="Use Mechanism.neighbors"):
        assert claim.neighbours == claim.neighbors
    with pytest.warns(DeprecationWarning, match="Use max_samples_per_unit"):
        told = PrivacyArguments(1.0, 1e-3, 1.0, unit_ids=ids, max_rows_per_unit=3)
    assert told.sampling_arguments(rows)["max_samples_per_unit"] == 3


class Named(UseBackward):
    """A use whose new names give their names."""

    def __init__(self) -> None:
        pass

    def samples(self, x: Any) -> Any:
        return "samples", x

    def sample_of_entry(self) -> Any:
        return "sample of entry"


def test_old_names_in_rules() -> None:
    with pytest.warns(DeprecationWarning, match=r" is deprecated. Call use\.samples"):
        assert Named().rows(3) == ("samples", 3)
    with pytest.warns(DeprecationWarning, match=r" is deprecated. Call use\.sample_of_entry"):
        assert Named().entry_owners() == "sample of entry"


def test_by_both_names() -> None:
    with pytest.raises(ArgumentTypeError, match="Omit max_rows_per_unit"):
        new_keywords({"max_rows_per_unit": 1, "max_samples_per_unit": 1})


@pytest.mark.parametrize("old", COMMANDS)
def test_a_command(old: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"fastclip.{old.partition('.')[0]}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "matmul" in done.stdout

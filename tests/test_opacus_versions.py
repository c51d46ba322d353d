"""What differs between versions of Opacus: the same here, whichever is installed."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import opacus
import pytest
import torch
from opacus.accountants import IAccountant, RDPAccountant
from opacus.data_loader import DPDataLoader
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, unwrap
from fastclip.accounting.ledger import keep_ledger
from fastclip.accounting.pld import PLDAccountant
from fastclip.core import opacus_names
from fastclip.core.opacus_names import create_accountant, register_accountant
from tests.opacus_runs import MODES
from tests.refusal import refused

HIDDEN = """
import sys, warnings
import opacus
from opacus.grad_sample import gsm_base
from opacus.optimizers import optimizer

known = gsm_base.OPACUS_PARAM_MONKEYPATCH_ATTRS
for owner, name in (
    (optimizer, "_mark_as_processed"), (opacus.PrivacyEngine, "_prepare_data_loader"),
    (gsm_base, "OPACUS_PARAM_MONKEYPATCH_ATTRS"), (known, "_forward_counter"),
):
    if owner is known:
        known.remove(name)
    else:
        held = vars(owner)[name]
        delattr(owner, name)
    try:
        from fastclip import FastPrivacyEngine
    except ImportError as error:
        print(error)
    if owner is known:
        known.append(name)
    else:
        setattr(owner, name, held)
opacus.__version__ = "99.0"
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    from fastclip import FastPrivacyEngine
    import fastclip.opacus
for warning in said:
    print(warning.filename, warning.message)
"""


def test_names_that_are_missing_and_versions_that_are_new() -> None:
    """The import says so: an ImportError that names what is missing, or one warning."""
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN], check=True, capture_output=True, text=True
    )
    *errors, warning = [line for line in done.stdout.splitlines() if "Opacus" in line]
    for name, error in zip(
        (
            "opacus.optimizers.optimizer._mark_as_processed", "PrivacyEngine._prepare_data_loader",
            "gsm_base.OPACUS_PARAM_MONKEYPATCH_ATTRS", "Parameter._forward_counter",
        ),
        errors, strict=True,
    ):  # fmt: skip
        assert name in error
        assert all(version in error for version in opacus_names.TESTED)
    assert warning.startswith("<string> Opacus 99.0")
    assert all(version in warning for version in opacus_names.TESTED)


@pytest.mark.parametrize(
    ("version", "warns"),
    [
        (opacus_names.TESTED[-1], 0),
        (opacus_names.TESTED[0], 0),
        ("1.6.1", 1),
        ("1.10.0.dev3", 1),
        ("2", 1),
    ],
)
def test_which_versions_are_new(version: str, warns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opacus_names, "VERSION", version)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        opacus_names._check_version()
    assert len(said) == warns


def make(net: nn.Module, mode: str, **options: Any) -> tuple:
    return FastPrivacyEngine(accountant="rdp").make_private(
        module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=6),
        noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode=mode, **options,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["fast", *MODES])
def test_cleanup_makes_a_model_ordinary(mode: str) -> None:
    net = nn.Linear(4, 2)
    for away in ("cleanup", "to_standard_module"):
        model = make(net, mode)[0]
        assert unwrap(model) is net
        getattr(model, away)()
        model.cleanup()  # again is nothing
        assert not net._forward_hooks
        assert not any(opacus_names.OPACUS_MARK in vars(p) for p in net.parameters())
        net(torch.ones(3, 4)).sum().backward()
        assert net.weight.grad is not None
        net.weight.grad = None


@pytest.mark.parametrize("wrapped", ["hooks", "fast"])
def test_wrappers_and_handles_are_told(wrapped: str) -> None:
    made = make(nn.Linear(4, 2), wrapped, wrap_model=wrapped == "hooks")[0]
    assert isinstance(made, opacus_names.AbstractGradSampleHooks)
    assert not isinstance(nn.Linear(1, 1), opacus_names.AbstractGradSampleHooks)


def test_what_opacus_does_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before 1.6: refused, and the model is as it was."""
    monkeypatch.setattr(opacus_names, "HANDLES", False)
    net = nn.Linear(4, 2)
    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("ghost_fsdp", {}), ("ghost_tp", {}), ("hooks", {"wrap_model": False}),
    )  # fmt: skip
    for mode, options in cases:
        with refused(f"grad_sample_mode='{mode}' expects Opacus 1.6, got {opacus_names.VERSION}"):
            make(net, mode, **options)
    assert not net._forward_hooks


@pytest.mark.parametrize("batch_first", [True, False])
def test_what_opacus_does_not_hand_on(batch_first: bool) -> None:
    """The loader of Opacus' own modes knows what make_private was asked for."""
    loader = make(nn.Linear(4, 2), "hooks", batch_first=batch_first, rand_on_empty=True)[-1]
    assert loader.collate_fn.rand_on_empty
    assert loader.collate_fn.batch_first is batch_first
    plain = make(nn.Linear(4, 2), "hooks")[-1]
    assert not plain.collate_fn.rand_on_empty
    assert plain.collate_fn.batch_first


def test_collate_functions_below_opacus() -> None:
    def collate(rows: list[Any]) -> list[Any]:
        return rows

    plain = DataLoader(TensorDataset(torch.randn(24, 4)), batch_size=6, collate_fn=collate)
    theirs = DPDataLoader.from_data_loader(plain)
    assert theirs.collate_fn is not collate
    assert opacus_names.without_empty(theirs.collate_fn) is collate
    assert opacus_names.without_empty(collate) is collate


@pytest.mark.parametrize("kind", [RDPAccountant, PLDAccountant])
def test_states_of_every_version(kind: type[IAccountant]) -> None:
    """1.6 saves a mechanism's name, 1.5 the method that says it."""
    for mechanism in (kind.mechanism(), kind.mechanism):
        book: Any = kind()
        book.step(noise_multiplier=1.0, sample_rate=0.1)
        state = book.state_dict()
        ledger = keep_ledger(kind())
        ledger.load_state_dict({**state, "mechanism": mechanism})
        assert ledger.history == [(1.0, 0.1, 1)]
        saved = ledger.state_dict()
        assert saved["mechanism"] == kind.mechanism()
        again = keep_ledger(kind())
        again.load_state_dict(saved)
        assert again.history == ledger.history
        other = keep_ledger(create_accountant("prv"))
        with refused(f"was accounted by '{kind.mechanism()}'"):
            other.load_state_dict({**state, "mechanism": mechanism})


def test_accountants_that_are_registered() -> None:
    class Mine(RDPAccountant):
        @classmethod
        def mechanism(cls) -> str:
            return "mine"

    assert type(create_accountant("pld")) is PLDAccountant
    with pytest.raises(ValueError, match="registered"):
        register_accountant("pld", Mine)
    with pytest.raises(ValueError, match="nobody's"):
        create_accountant("nobody's")
    register_accountant("mine", Mine, force=True)
    assert FastPrivacyEngine(accountant="mine").accountant.mechanism() == "mine"


def test_keywords_that_overrides_get() -> None:
    """Those of Opacus' own method, and all where it takes all."""
    asked = {"distributed": False, "poisson_sampling": True, "of_another_version": 1}
    got = opacus_names.handed_on("_prepare_data_loader", asked)
    assert got == {"distributed": False, "poisson_sampling": True}
    assert opacus_names.handed_on("_prepare_optimizer", asked) == asked


def test_the_multiplier_that_was_asked_for() -> None:
    """Opacus 1.5 writes another one over it, which its accountant would read."""
    options: dict[str, Any] = {
        "clipping": "adaptive", "target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2,
        "max_clipbound": 10.0, "min_clipbound": 0.1, "unclipped_num_std": 2.0,
    }  # fmt: skip
    assert make(nn.Linear(4, 2), "hooks", **options)[1].noise_multiplier == 1.0
    assert isinstance(opacus.__version__, str)

"""What a sweep drops is given back: models, optimizers, loaders and data; what was spent stays."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.errors import StepError
from tests.refusal import refused

DELTA = 1e-5


def _train(engine: FastPrivacyEngine, after: str, steps: int = 1, **options: Any) -> dict:
    """Weak references to all that a run was made of; nothing else of it is returned."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    data = TensorDataset(torch.randn(64, 6))
    loader, inner = DataLoader(data, batch_size=8), torch.optim.Adam(model.parameters())
    make = engine.make_private_with_epsilon if "epochs" in options else engine.make_private
    options = ({} if "epochs" in options else {"noise_multiplier": 1.0}) | options
    private, optimizer, drawn = make(
        module=model, optimizer=inner, data_loader=loader, max_grad_norm=1.0, **options
    )
    net = model if options.get("wrap_model") is False else private
    step: Any = None
    if after == "captured":
        step = engine.make_step(net, lambda m, x: m(x).sum(1), physical_batch=64)
    for _, (x,) in zip(range(steps), drawn, strict=False):
        if step is None:
            net(x).sum().backward()
        else:
            step(x)
        optimizer.step()
        optimizer.zero_grad()
    if after == "backward":
        net(next(iter(drawn))[0]).sum().backward()
    elif after == "failure":
        with pytest.raises(RuntimeError):
            net(torch.randn(8, 5))
    elif after == "cleanup":
        private.cleanup()
    parts = {
        "model": model, "private": private, "optimizer": optimizer, "inner": inner,
        "data": data, "loader": loader, "drawn": drawn, "weight": model[0].weight,
    }  # fmt: skip
    return {name: weakref.ref(part) for name, part in parts.items()}


def _alive(parts: dict[str, weakref.ref]) -> list[str]:
    gc.collect()
    return [name for name, part in parts.items() if part() is not None]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options",
    [
        {"after": "", "steps": 0},
        {"after": "", "steps": 3},
        {"after": "backward"},
        {"after": "failure"},
        {"after": "cleanup"},
        {"after": "captured"},
        {"after": "", "wrap_model": False},
        {"after": "", "clipping": "adaptive", "target_unclipped_quantile": 0.5},
        {"after": "", "target_epsilon": 8.0, "target_delta": DELTA, "epochs": 2},
        {"after": "", "grad_sample_mode": "hooks"},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_nothing_is_kept(options: dict[str, Any]) -> None:
    engine = FastPrivacyEngine(accountant="rdp")
    assert _alive(_train(engine, **options)) == []


def _untrained(engine: FastPrivacyEngine, end: str, **options: Any) -> dict:
    """Weak references to a run and its workers, of which the last batch drawn is not trained on."""
    model, data = nn.Linear(6, 3), TensorDataset(torch.randn(64, 6))
    source = DataLoader(data, batch_size=8, **options)
    private, optimizer, drawn = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=source,
        noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=end != "shuffled",
    )  # fmt: skip
    batches = iter(drawn)
    private(next(batches)[0]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if end == "validation":
        with torch.no_grad():
            for (x,) in batches:
                private(x)
    elif end == "failure":
        with pytest.raises(RuntimeError):
            private(next(batches)[0][:, :5])
    else:
        next(batches)
    workers = [weakref.ref(each) for each in getattr(batches, "_workers", [])]
    parts = {"model": model, "data": data, "source": source, "drawn": drawn, "batches": batches}
    found = {name: weakref.ref(part) for name, part in parts.items()}
    return found | {f"worker {i}": each for i, each in enumerate(workers)}


@pytest.mark.parametrize(
    ("end", "options"),
    [
        ("early", {}),
        ("early", {"num_workers": 1}),
        ("shuffled", {"num_workers": 1, "persistent_workers": True}),
        ("validation", {}),
        ("failure", {}),
    ],
)
def test_a_batch_that_is_not_trained_on(end: str, options: dict[str, Any]) -> None:
    """The data set and the loader's processes are given back, too, and the ledger stays right."""
    engine = FastPrivacyEngine(accountant="rdp")
    assert _alive(_untrained(engine, end, **options)) == []
    assert sum(steps for *_, steps in engine.accountant.history) == 1
    assert engine.mechanism(delta=DELTA).epsilon == engine.get_epsilon(DELTA)


def test_a_sweep() -> None:
    """What every model has spent is counted, whoever is gone; and what was told last is told."""
    engine = FastPrivacyEngine(accountant="rdp")
    spent = []
    for _ in range(3):
        parts = _train(engine, "", steps=2, poisson_sampling=True)
        assert _alive(parts) == []
        spent.append(engine.get_epsilon(DELTA))
    assert spent == sorted(set(spent))
    assert sum(steps for *_, steps in engine.accountant.history) == 6
    assert engine.mechanism(delta=DELTA).epsilon == spent[-1]
    assert engine.sampling.rate == 1 / 8
    assert [row.path for row in engine.plan().rows] == ["0", "2"]
    with engine.paused():
        pass
    with refused("make_private", ValueError):
        engine.set_groups(torch.zeros(8, dtype=torch.int64))
    with refused("make_private first", StepError):
        FastPrivacyEngine().plan()


def test_what_is_in_use_is_kept() -> None:
    """The engine knows of a model of which the optimizer, or the bare model alone, is held."""
    model = nn.Linear(6, 3)
    engine = FastPrivacyEngine(accountant="rdp")
    loader = DataLoader(TensorDataset(torch.randn(64, 6)), batch_size=8)
    _, optimizer, _ = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
        noise_multiplier=0.0, max_grad_norm=1.0, poisson_sampling=False, wrap_model=False,
    )  # fmt: skip
    gc.collect()
    with engine.paused():
        model(torch.randn(8, 6)).sum().backward()
    assert model.weight.__dict__.get("summed_grad") is None
    model(torch.randn(8, 6)).sum().backward()
    assert model.weight.summed_grad is not None
    optimizer.step()

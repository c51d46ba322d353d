"""Traced steps in wrappers: what they do is proven, what they hold is theirs, what couples is found."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, GradScaler
from fastclip.errors import GraphError
from tests.distributed import world
from tests.oracle import Batch, norms, per_sample_gradients, relative_error

CLASSES, D, ROWS, BATCH = 3, 6, 32, 8
COUPLED = "mixes samples|number of the whole batch|number of several samples"
SHARED_OUT = ["ddp", "fsdp of parts"]
MORE = ["dpddp", "fsdp", "fsdp, whole after forward", "fsdp, other axes"]


def loss_of(out: Tensor, y: Tensor, coupled: bool) -> Tensor:
    """Cross entropy, alone or with a term of the whole batch."""
    loss = F.cross_entropy(out, y)
    if coupled:  # Dice of the batch
        p, t = out.float().softmax(-1), (y[:, None] == torch.arange(CLASSES)).float()
        loss = loss + 1 - 2 * (p * t).sum() / (p + t).sum()
    return loss


def dataset() -> TensorDataset:
    g = torch.Generator().manual_seed(3)
    return TensorDataset(torch.randn(ROWS, D, generator=g), torch.arange(ROWS) % CLASSES)


class Blocks(nn.Module):
    """[b, 6] -> [b, 3]; `way` runs each block."""

    def __init__(self, way: Callable[..., Tensor] = lambda block, x: block(x)) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, D)) for _ in range(2)
        )
        self.norm, self.head, self.way = nn.LayerNorm(D), nn.Linear(D, CLASSES), way

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.way(block, self.norm(x))
        return self.head(x)


def private(model: nn.Module, data: Any = None, **options: Any) -> tuple:
    """(engine, model, optimizer, loader), whose weights never change."""
    engine = FastPrivacyEngine(accountant="rdp")
    options = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "poisson_sampling": False, **options}
    parameters = [p for p in model.parameters() if p.requires_grad]
    made = engine.make_private(
        module=model.train(), optimizer=torch.optim.SGD(parameters, lr=0.0),
        data_loader=DataLoader(data or dataset(), batch_size=BATCH), **options,
    )  # fmt: skip
    return engine, *made


def check_norms(optimizer: Any, x: Tensor, y: Tensor, tolerance: float = 1e-5) -> None:
    """Of the last pass over `Blocks`."""

    def losses(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, reduction="none")

    expected = norms(per_sample_gradients(Blocks(), Batch((x,), target=y), losses))
    assert relative_error(optimizer.per_sample_norms, expected) <= tolerance


def check_proof(
    engine: FastPrivacyEngine, verdicts: Container[str] = frozenset({"proven"})
) -> None:
    """Both steps are proven, in one of these ways."""
    proof = engine.explain()
    assert len(proof.steps) == 2
    assert all(report.verdict in verdicts for report in proof.steps), str(proof)
    assert all(report.uses for report in proof.steps)
    assert not any(report.outside for report in proof.steps)
    assert not proof.unproven
    assert torch._C._len_torch_dispatch_stack() == 0


# One process


def plain(coupled: bool, way: Callable[..., Tensor] | None = None, tolerance: float = 1e-5) -> Any:
    engine, model, optimizer, loader = private(Blocks() if way is None else Blocks(way))
    for x, y in loader:
        optimizer.zero_grad()
        loss_of(model(x), y, coupled).backward()
        check_norms(optimizer, x, y, tolerance)
        optimizer.step()
    return engine


def autocast(coupled: bool) -> Any:
    engine, model, optimizer, loader = private(Blocks())
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(x), y, coupled)
        loss.backward()
        check_norms(optimizer, x, y, 0.03)
        optimizer.step()
    return engine


def scaled(coupled: bool) -> Any:
    engine, model, optimizer, loader = private(Blocks())
    scaler = GradScaler(init_scale=2.0**12)
    for x, y in loader:
        optimizer.zero_grad()
        scaler.scale(loss_of(model(x), y, coupled)).backward()
        check_norms(optimizer, x, y)
        scaler.step(optimizer)
        scaler.update()
    return engine


def reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def recomputed(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def accumulated(coupled: bool) -> Any:
    """Two passes for each step; it is the second one that mixes samples."""
    engine, model, optimizer, loader = private(Blocks())
    for k, (x, y) in enumerate(loader):
        loss_of(model(x), y, coupled and k % 2 == 1).backward()
        check_norms(optimizer, x, y)
        if k % 2:
            optimizer.step()
            optimizer.zero_grad()
    return engine


def in_parts(coupled: bool) -> Any:
    options = {"poisson_sampling": True, "sample_rate": 0.5, "expected_batch_size": ROWS / 2}
    engine, model, optimizer, loader = private(Blocks(), **options)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=5, optimizer=optimizer
    ) as batches:
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(model(x), y, coupled).backward()
            check_norms(optimizer, x, y)
            optimizer.step()
    return engine


def accelerated(coupled: bool, precision: str = "no") -> Any:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    engine, *made = private(Blocks())
    model, optimizer, loader = accelerator.prepare(*made)
    for x, y in loader:
        optimizer.zero_grad()
        accelerator.backward(loss_of(model(x), y, coupled))
        check_norms(made[1], x, y, 1e-5 if precision == "no" else 0.03)
        optimizer.step()
    return engine


ONE_PROCESS: dict[str, Callable[[bool], Any]] = {
    "plain": plain,
    "autocast": autocast,
    "GradScaler": scaled,
    "reentrant": partial(plain, way=reentrant),
    "non-reentrant": partial(plain, way=recomputed),
    "accumulation": accumulated,
    "physical batches": in_parts,
    "Accelerate": accelerated,
    "Accelerate, bf16": partial(accelerated, precision="bf16"),
}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ONE_PROCESS)
def test_one_process(name: str) -> None:
    check_proof(ONE_PROCESS[name](False))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("name", ONE_PROCESS)
def test_one_process_finds_a_coupled_loss(name: str) -> None:
    with pytest.raises(GraphError, match=COUPLED):
        ONE_PROCESS[name](True)
    assert torch._C._len_torch_dispatch_stack() == 0


# Models of transformers


@pytest.mark.slow
def test_lora() -> None:
    pytest.importorskip("peft")
    from tests.integrations.adapters import batch, lora

    engine, model, optimizer, _ = private(lora(), TensorDataset(torch.zeros(8)))
    for _ in range(2):
        inputs = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(**inputs.kwargs).logits, inputs.target).backward()
        expected = norms(
            per_sample_gradients(
                lora(), inputs, lambda out, y: F.cross_entropy(out.logits, y, reduction="none")
            )
        )
        assert relative_error(optimizer.per_sample_norms, expected) <= 1e-4
        optimizer.step()
    check_proof(engine, {"proven", "values", "path"})
    inputs = batch()
    engine, model, *_ = private(lora(), TensorDataset(torch.zeros(8)))
    with pytest.raises(GraphError, match=COUPLED):
        loss_of(model(**inputs.kwargs).logits, inputs.target, True).backward()


def test_a_trainer(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.integrations.tiny import trainer

    run = trainer(tmp_path, arguments={"num_train_epochs": 1})
    run.train()
    check_proof(run.engine, {"proven", "values", "path"})


@pytest.mark.parametrize("physical", [pytest.param(8, marks=pytest.mark.slow), 4])
def test_a_trainer_with_a_coupled_loss(tmp_path: Path, physical: int) -> None:
    pytest.importorskip("transformers")
    from tests.integrations.tiny import trainer

    def loss(outputs: Any, labels: Tensor, **_: Any) -> Tensor:
        return loss_of(outputs.logits, labels, True)

    run = trainer(tmp_path, physical=physical, accumulation=8 // physical, compute_loss_func=loss)
    with pytest.raises(GraphError, match=COUPLED):
        run.train()


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_lightning() -> None:
    pytest.importorskip("lightning")
    from tests.integrations.test_lightning import Classifier, fit

    class Mixed(Classifier):
        def training_step(self, batch: Any, index: int) -> Tensor:
            return loss_of(self(batch[0]), batch[1], True)

    engine = FastPrivacyEngine(accountant="rdp")
    fit(engine, kind=Classifier, max_epochs=1)
    check_proof(engine, {"proven", "values", "path"})
    with pytest.raises(GraphError, match=COUPLED):
        fit(FastPrivacyEngine(accountant="rdp"), kind=Mixed, max_epochs=1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's advice
@pytest.mark.parametrize("kind", ["Direct", "Parts", "Manual"])
def test_lightning_past_forward(kind: str) -> None:
    pytest.importorskip("lightning")
    from tests.integrations import test_lightning

    engine = FastPrivacyEngine(accountant="rdp")
    test_lightning.fit(engine, kind=getattr(test_lightning, kind), max_epochs=1)
    check_proof(engine, {"proven", "values", "path"})


# Two processes


@pytest.fixture(
    scope="module", params=[SHARED_OUT, pytest.param(MORE, marks=pytest.mark.slow)], ids=str
)
def ranks(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return world.run(2, "tests.trace.ranks:kinds", folder, *request.param)


@pytest.mark.slow
def test_two_processes(ranks: list[dict[str, Any]]) -> None:
    """Buckets and gathered parameters are neither trained outside nor of any sample, then and later."""
    for found in (found for rank in ranks for found in rank.values()):
        assert found["verdicts"] == ["proven", "proven"], found["told"]
        assert all(found["uses"])
        assert found["outside"] == [0, 0]
        assert found["mixing"] == [0, 0], found["told"]
        assert found["unproven"] == 0
        assert found["modes"] == 0
        assert found["error"] <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["coupled", "gathered"])
def test_two_processes_find_a_coupled_loss(ranks: list[dict[str, Any]], loss: str) -> None:
    """Of the rank's own batch, and of what it gathers from the other."""
    for found in (found for rank in ranks for found in rank.values()):
        assert "mixes samples" in found[loss] or "whole batch" in found[loss]
        assert "ranks.py" in found[loss]

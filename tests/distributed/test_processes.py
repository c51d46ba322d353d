"""Processes that would train apart in silence are refused, by name."""

from __future__ import annotations

import re

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from fastclip import FastPrivacyEngine
from fastclip.errors import GraphError, UnsupportedLayerError
from tests.distributed import world
from tests.networks import mlp, rows
from tests.oracle import backward, make_private, sample_loss
from tests.refusal import refused

WAY_OUT = "(DistributedDataParallel, or call fully_shard on it, before|to) make_private"


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[dict[str, str]]:
    """What two processes (gloo) were told."""
    folder = tmp_path_factory.mktemp("processes")
    return world.run(2, "tests.distributed.refused:told", folder, str(folder))


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("bare", "The process group has 2 processes"),
        ("ddp inside", r"^backbone \(DistributedDataParallel\)"),
        ("fsdp2 inside", r"^backbone \(FSDPSequential\)"),
        ("later none", "The process group has 2 processes"),
        ("later ddp", "runs inside DistributedDataParallel, which was added after"),
        ("later dpddp", "The process group has 2 processes"),
        ("backward alone", "The process group has 2 processes"),
    ],
)
def test_two_processes(said: list[dict[str, str]], case: str, name: str) -> None:
    for process in said:
        assert re.search(WAY_OUT, process[case])
        assert re.search(name, process[case]), process[case]


def test_what_trains(said: list[dict[str, str]]) -> None:
    """Wrapped models, and Opacus' own mode; no refused pass left a sum."""
    for case in ("ddp", "dpddp", "fsdp2", "hooks"):
        assert [process[case] for process in said] == ["", ""]
    assert [process["summed"] for process in said] == ["0", "0"]


@pytest.fixture
def alone(tmp_path) -> None:
    """A process group of one."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_one_process_of_a_group_trains() -> None:
    _, private, optimizer, _ = make_private(mlp())
    backward(private, rows())
    optimizer.step()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("wrap_model", [True, False])
def test_ddp_around_the_private_model(wrap_model: bool) -> None:
    """Alone it changes no number, but its reducer waits for gradients that never come."""
    model = mlp()
    private = make_private(model, wrap_model=wrap_model)[1]
    outside = DDP(private if wrap_model else model)
    with refused("runs inside DistributedDataParallel.*" + WAY_OUT, GraphError):
        sample_loss(outside(rows())).mean().backward()
    private.cleanup()
    inside = nn.Sequential(DDP(mlp()))
    with refused(r"^0 \(DistributedDataParallel\)", UnsupportedLayerError):
        make_private(inside)
    found = FastPrivacyEngine().explain(module=inside)
    assert any(re.search(WAY_OUT, why) for why in found.errors)


def test_data_parallel() -> None:
    """On several devices it would run copies of the private layers."""
    for model in (nn.DataParallel(mlp()), nn.Sequential(nn.DataParallel(mlp()))):
        with refused("Pass the model that it wraps", UnsupportedLayerError):
            make_private(model)
    private = make_private(mlp())[1]
    with refused("DataParallel", GraphError):
        private._replicate_for_data_parallel()


def test_a_launcher_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun sets the world's size before there is a group: only the group counts."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    private = make_private(mlp())[1]
    backward(private, rows())
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    with refused(WAY_OUT, GraphError):
        private(rows())
    with torch.no_grad():
        assert private(rows()).shape == (5, 3)

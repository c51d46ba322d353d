"""Per-sample gradients are raw data on parameters: they can be read, and are not saved with them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import fastclip
from tests.opacus_runs import MODES, C, backward, gradients, moved, rows, start, weights
from tests.oracle import relative_error, sample_loss

SAVED: dict[str, Callable[[nn.Module, Any], Any]] = {
    "parameters": lambda net, _: list(net.parameters()),
    "a state with parameters": lambda net, _: net.state_dict(keep_vars=True),
    "the model": lambda net, _: net,
    "the private model": lambda _, model: model,
}
MOMENTS = ("passed", "skipped", "stepped")


def saved(what: Any) -> bytes:
    file = io.BytesIO()
    torch.save(what, file)
    return file.getvalue()


def trained(mode: str, moment: str, passes: int = 1) -> tuple[nn.Module, Any, Tensor, Any]:
    """(net, model, per-sample gradients of its first weight, optimizer) at this moment of a batch."""
    net, model, optimizer, _ = start(mode)
    for k in range(passes):
        backward(model, rows(k))
    held = net[0].weight.grad_sample
    samples = torch.cat(held) if isinstance(held, list) else held
    if moment == "skipped":
        optimizer.signal_skip_step(True)
    if moment != "passed":
        optimizer.step()
    return net, model, samples, optimizer


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("what", SAVED)
@pytest.mark.parametrize("mode", MODES)
def test_saved_parameters_hold_no_rows(mode: str, what: str, moment: str, passes: int) -> None:
    if mode == "ew" and passes > 1:
        pytest.skip("torch's expanded weights refuse a second pass")
    net, model, samples, _ = trained(mode, moment, passes)
    try:
        file = saved(SAVED[what](net, model))
    except (AttributeError, pickle.PicklingError):
        assert mode == "functorch"  # Opacus' functions there cannot be pickled
        return
    assert samples.abs().sum() > 0
    assert net[0].weight.detach().numpy().tobytes() in file
    for sample in samples:
        assert sample.detach().numpy().tobytes() not in file
    loaded = torch.load(io.BytesIO(file), weights_only=what in ("parameters",))
    if what == "parameters":
        assert torch.equal(loaded[0], net[0].weight)
        held = loaded[0].grad_sample
        assert all(not part.numel() for part in (held if isinstance(held, list) else [held]))


COPIES: dict[str, Callable[[nn.Module], Any]] = {
    "itself": lambda model: model,
    "a deep copy": copy.deepcopy,
    "an average": lambda model: AveragedModel(fastclip.unwrap(model)),
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("mode", MODES)
def test_a_model_saved_before_its_backward_pass_holds_no_rows(mode: str, copied: str) -> None:
    """Opacus keeps what its layers were given until then; the pass goes on as it would have."""
    net, model, _, _ = start(mode)
    x = rows()
    reference = gradients(net, x)["0.weight"]
    loss = 1e3 * sample_loss(model(x)).mean()
    try:
        file = saved(COPIES[copied](model))
    except (AttributeError, TypeError, pickle.PicklingError):
        assert mode == "functorch"
    else:
        assert net[0].weight.detach().numpy().tobytes() in file
        for row in x:
            assert row.numpy().tobytes() not in file
    loss.backward()
    assert relative_error(net[0].weight.grad_sample, reference) < 1e-4


@pytest.mark.parametrize("mode", MODES)
def test_what_is_shown_are_the_gradients(mode: str) -> None:
    """Opacus' code, and a user's, computes with them as with plain tensors."""
    net, model, optimizer, _ = start(mode)
    reference = gradients(net, rows())["0.weight"]
    backward(model)
    shown = net[0].weight.grad_sample
    assert relative_error(shown, reference) < 1e-4
    assert type(shown * 2) is Tensor
    assert type(torch.cat([shown, shown])) is Tensor
    copied = copy.deepcopy(shown)
    assert torch.equal(copied, shown * 1)
    assert type(copied + 1) is Tensor
    before = weights(net)
    optimizer.step()
    assert 0 < max(moved(net, before)) <= C * (1 + 1e-5)


def test_nothing_is_left_of_it_after_cleanup() -> None:
    net, model, _, _ = trained("hooks", "stepped")
    model.cleanup()
    assert not net._forward_hooks
    assert b"fastclip" not in saved(net)
    assert fastclip.unwrap(net) is net


@pytest.mark.parametrize("left", ["_current_grad_sample", "_norm_sample"])
def test_what_else_opacus_leaves(left: str) -> None:
    net, model, optimizer, _ = start()
    backward(model)
    samples = torch.randn(4, 6, 5)
    setattr(net[0].weight, left, samples)
    optimizer.step()
    assert samples.numpy().tobytes() not in saved(list(net.parameters()))


@pytest.mark.filterwarnings("ignore:.*not in the private optimizer")
def test_parameters_of_no_optimizer() -> None:
    """Opacus' code writes to them as well, and their list grew with every pass."""
    net, model, optimizer, _ = start()
    optimizer.param_groups[0]["params"] = list(net[0].parameters())
    for _ in range(3):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
    held = net[2].weight.grad_sample
    assert held.shape[0] == 4
    assert held.numpy().tobytes() not in saved(list(net.parameters()))

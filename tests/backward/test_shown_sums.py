"""`p.summed_grad` is raw data on a parameter: it can be read, and is not saved with it."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastclip.errors import StepError
from tests.networks import mlp, rows
from tests.oracle import backward, clipped_sum, make_private, norms, per_sample_gradients
from tests.refusal import refused


def _torch_saved(what: Any) -> bytes:
    file = io.BytesIO()
    torch.save(what, file)
    return file.getvalue()


def _loaded(saved: bytes) -> Any:
    return torch.load(io.BytesIO(saved), weights_only=True)


SAVED: dict[str, Callable[[nn.Module, Any], bytes]] = {
    "a parameter": lambda net, _: _torch_saved(net[0].weight),
    "a list": lambda net, _: _torch_saved(list(net.parameters())),
    "a module of parameters": lambda net, _: pickle.dumps(nn.ParameterList(net.parameters())),
    "a state with parameters": lambda net, _: _torch_saved(net.state_dict(keep_vars=True)),
    "pickled": lambda net, _: pickle.dumps(net[0].weight),
    "the inner optimizer": lambda _, private: _torch_saved(private.original_optimizer),
}


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("what", SAVED)
def test_saved_parameters_hold_no_sums(what: str, stepped: bool) -> None:
    net = mlp()
    _, private, optimizer, _ = make_private(net)
    backward(private, rows(4))
    if stepped:
        optimizer.step()
    shown = net[0].weight.summed_grad
    saved = SAVED[what](net, optimizer)
    assert shown.abs().sum() > 0
    assert net[0].weight.detach().numpy().tobytes() in saved
    assert shown.numpy().tobytes() not in saved
    if what in ("a parameter", "a list"):
        loaded = _loaded(saved)
        first = loaded[0] if what == "a list" else loaded
        assert torch.equal(first, net[0].weight)
        assert not first.summed_grad.numel()


def test_it_is_read_as_a_tensor() -> None:
    net, x = mlp(), rows(4)
    grads = per_sample_gradients(net, x)
    C = norms(grads).median().item()
    expected = clipped_sum(grads, C)["0.weight"]
    _, private, optimizer, _ = make_private(net, max_grad_norm=C)
    backward(private, x)
    shown = net[0].weight.summed_grad
    torch.testing.assert_close(shown + 0, expected, rtol=1e-9, atol=1e-12)
    assert isinstance(shown, Tensor)
    assert type(2 * shown) is Tensor
    assert torch.equal(copy.deepcopy(shown), shown.detach())
    shown.mul_(2)
    with refused("errors.html#changed-tensors", StepError):
        optimizer.step()

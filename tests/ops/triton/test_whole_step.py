"""Whole steps of the engine on the kernels alone equal the reference's, and every kernel serves."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

from fastclip.ops import dispatch
from fastclip.ops.dispatch import use_backend
from fastclip.ops.units import UnitSamples
from tests.ops.triton.oracle import DEVICE, relative_error
from tests.oracle import make_private, sample_loss, summed
from tests.test_no_synchronization import MODELS, STRATEGIES

USED = {
    "sequence": {"layer_norm_backward", "ghost_norms", "scaled_sum"},
    "rows": {"rms_norm_backward", "scaled_sum"},
    "images": {"group_norm_backward"},
    "tied text": {"lookup_norm", "lookup_sum", "layer_norm_backward", "scaled_sum"},
}


def step(model, inputs, strategy, backend: str):
    """Clipped sums, norms, thresholds and counts of one step."""
    model = copy.deepcopy(model).to(DEVICE)
    with use_backend(backend):
        engine, private, optimizer, _ = make_private(model, clipping=strategy, max_grad_norm=0.5)
        engine.set_groups(torch.arange(len(inputs), device=DEVICE) % 3)
        sample_loss(private(inputs.to(DEVICE))).mean().backward()
        sums = summed(dict(model.named_parameters()))
        optimizer.step()
    return sums, optimizer


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_kernels_train_like_the_reference(name: str, strategy: str, monkeypatch) -> None:
    monkeypatch.setattr(dispatch, "_STATE", dispatch._State("auto"))
    build, make_inputs = MODELS[name]
    model, inputs = build(), make_inputs()
    chosen = STRATEGIES[strategy]
    expected, plain = step(model, inputs, chosen, "reference")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*kernel of (?!noise_finalize|fill_normal).*")
        found, tuned = step(model, inputs, chosen, "triton")
    for key, value in expected.items():
        assert relative_error(found[key], value) <= 1e-5, key
    assert relative_error(tuned.per_sample_norms, plain.per_sample_norms) <= 1e-5
    assert torch.allclose(tuned.threshold, plain.threshold, rtol=1e-9)
    if plain.noisy_counts is not None:
        assert torch.equal(tuned.noisy_counts, plain.noisy_counts)
    served = {key.split()[1] for key in dispatch._STATE.proven}
    assert served >= USED[name] | {"clip_scale"}


def test_a_layer_used_twice(monkeypatch) -> None:
    """Its uses are joined in the kernel, cross terms included."""
    monkeypatch.setattr(dispatch, "_STATE", dispatch._State("auto"))
    layer = torch.nn.Linear(32, 32)
    model, inputs = torch.nn.Sequential(layer, torch.nn.Tanh(), layer), torch.randn(4, 3, 32)
    expected, plain = step(model, inputs, STRATEGIES["flat"], "reference")
    found, joined = step(model, inputs, STRATEGIES["flat"], "triton")
    for key, value in expected.items():
        assert relative_error(found[key], value) <= 1e-5, key
    assert relative_error(joined.per_sample_norms, plain.per_sample_norms) <= 1e-5
    assert "triton ghost_norm_concat" in dispatch._STATE.proven


def test_a_layer_that_is_known_to_be_used_twice_takes_its_bias_apart(monkeypatch) -> None:
    """No norm of one use is wanted then."""
    monkeypatch.setattr(dispatch, "_STATE", dispatch._State("triton"))
    layer = torch.nn.Linear(32, 32)
    model = torch.nn.Sequential(layer, torch.nn.Tanh(), layer).to(DEVICE)
    _, private, optimizer, _ = make_private(model)
    for _ in range(2):
        dispatch._STATE.proven.clear()
        optimizer.zero_grad()
        sample_loss(private(torch.randn(4, 3, 32, device=DEVICE))).mean().backward()
    assert "triton ghost_norm_concat" in dispatch._STATE.proven
    assert "triton ghost_norms" not in dispatch._STATE.proven


def test_units_take_their_bias_apart(monkeypatch) -> None:
    """A unit's norm is of the rows of all its samples, which the layer's own is not."""
    monkeypatch.setattr(dispatch, "_STATE", dispatch._State("auto"))
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.Linear(16, 3))
    x = torch.randn(4, 9, 12)
    found = []
    for backend in ("reference", "triton"):
        private = copy.deepcopy(model).to(DEVICE)
        with use_backend(backend):
            _, wrapped, optimizer, _ = make_private(private, max_grad_norm=0.5)
            optimizer.grad_state.batch.next_units = UnitSamples(torch.tensor([0, 1, 0, 2]), 3, 2)
            sample_loss(wrapped(x.to(DEVICE))).mean().backward()
        found.append(optimizer.per_sample_norms)
    assert relative_error(*found) <= 1e-5
    assert "triton ghost_norms" not in dispatch._STATE.proven

"""get_compatible_module: BatchNorm out of any model, the rest of it as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from opacus.validators import ModuleValidator
from torch import Tensor, nn

from fastclip import FastPrivacyEngine
from tests.oracle import DTYPES, check_exact
from tests.refusal import refused

fix = FastPrivacyEngine.get_compatible_module


def local() -> nn.Module:
    """A model whose classes have no name that pickle could import."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.norm(self.conv(x)))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = Block(), nn.Linear(4, 3)
            self.noise = torch.Generator().manual_seed(5)
            self.scale = lambda x: 2 * x

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.scale(self.block(x)).mean((2, 3)))

    torch.manual_seed(0)
    return Net()


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_class_of_a_function() -> None:
    model = local()
    before, modules = state(model), list(model.modules())
    fixed = fix(model)
    assert type(fixed) is type(model)
    assert type(fixed.block.norm) is nn.GroupNorm
    assert (fixed.block.norm.num_groups, fixed.block.norm.num_channels) == (4, 4)
    for name in ("block.conv.weight", "block.conv.bias", "head.weight", "head.bias"):
        assert torch.equal(fixed.state_dict()[name], before[name])
        assert fixed.state_dict()[name].data_ptr() != model.state_dict()[name].data_ptr()
    # the original is as it was
    assert list(model.modules()) == modules
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.rand(3, generator=model.noise), torch.rand(3, generator=fixed.noise))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_copy_is_trained_exactly(dtype: torch.dtype) -> None:
    check_exact(fix(local()), torch.randn(5, 3, 6, 6), dtype=dtype)


class Tied(nn.Module):
    """An embedding that is the output layer, too, and one BatchNorm at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(3)
        self.again = self.norm

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.again(self.first(self.norm(self.table(ids)))))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_are_kept(dtype: torch.dtype) -> None:
    model = Tied()
    fixed = fix(model)
    assert fixed.head.weight is fixed.table.weight
    assert fixed.head.weight is not model.head.weight
    assert fixed.norm is fixed.again
    assert type(fixed.norm) is nn.GroupNorm
    check_exact(fixed, torch.randint(0, 7, (5, 3)), dtype=dtype)


def test_two_norms_with_one_weight() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.LayerNorm(4))
    model[2].weight = model[1].weight
    model[3].bias = model[1].bias
    fixed = fix(model)
    assert fixed[1].weight is fixed[2].weight
    assert fixed[1].bias is fixed[3].bias
    assert fixed[2].bias is not fixed[1].bias
    check_exact(fixed, torch.randn(5, 4, 4), dtype=torch.float64)


class Twice(nn.Linear):
    """For which Opacus has been given a replacement, a layer of another shape."""


def test_a_tie_that_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ModuleValidator.FIXERS, Twice, lambda module: nn.Linear(4, 8))
    model = nn.ModuleDict({"twice": Twice(4, 4), "head": nn.Linear(4, 4)})
    model["head"].weight = model["twice"].weight
    with refused(r"twice \(Twice\): its weight is tied to other modules"):
        fix(model)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_stay(kind: type[nn.Module]) -> None:
    """They train as they are, tied or not."""
    model = nn.ModuleDict({"rnn": kind(4, 4), "head": nn.Linear(4, 4, bias=False)})
    model["head"].weight = model["rnn"].weight_hh_l0
    fixed = fix(model)
    assert type(fixed["rnn"]) is kind
    assert fixed["head"].weight is fixed["rnn"].weight_hh_l0
    assert fixed["rnn"]._flat_weights[1] is fixed["rnn"].weight_hh_l0


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4, affine=False), nn.BatchNorm1d(4)])
def test_statistics_of_the_batch_alone(norm: nn.Module) -> None:
    """A BatchNorm without trained weights couples samples just the same."""
    norm.requires_grad_(False)
    fixed = fix(nn.Sequential(nn.Linear(4, 4), norm))
    assert type(fixed[1]) is nn.GroupNorm
    assert not any(p.requires_grad for p in fixed[1].parameters())
    check_exact(fixed, torch.randn(5, 4, 4), dtype=torch.float64)


def test_a_frozen_one_stays() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).requires_grad_(False))
    model[1].eval()
    assert type(fix(model)[1]) is nn.BatchNorm1d


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_type_of_the_model(dtype: torch.dtype) -> None:
    fixed = fix(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(dtype))
    assert {p.dtype for p in fixed.parameters()} == {dtype}


def test_hooks() -> None:
    """Those of a replaced module too, and on the copy they see the copy."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    seen: list[type] = []
    model[1].register_forward_hook(lambda module, args, out: seen.append(type(module)))
    fixed = fix(model)
    fixed(torch.randn(3, 4))
    assert seen == [nn.GroupNorm]
    model(torch.randn(3, 4))
    assert seen == [nn.GroupNorm, nn.BatchNorm1d]


def test_the_root_itself() -> None:
    assert type(fix(nn.BatchNorm1d(6))) is nn.GroupNorm


class Gated(nn.BatchNorm1d):
    """Not what GroupNorm computes, whatever its type."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(super().forward(x))


def normalized() -> nn.Module:
    """A weight that waits for its hook."""
    return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.BatchNorm1d(4))


def test_a_class_of_its_own() -> None:
    with refused(r"1 \(Gated\) normalizes over the batch in its own way"):
        fix(nn.Sequential(nn.Linear(4, 4), Gated(4)))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*")
@pytest.mark.parametrize("make", [normalized, lambda: nn.utils.skip_init(nn.BatchNorm1d, 4)])
def test_what_deepcopy_alone_does_not_copy(make: Callable[[], nn.Module]) -> None:
    model = make()
    x = torch.randn(5, 4)
    fixed = fix(model)
    assert fixed(x).shape == (5, 4)
    if isinstance(model, nn.Sequential):
        assert torch.equal(fixed[0](x), model[0](x))


def test_gradients_are_not_taken_along() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model(torch.randn(3, 4)).sum().backward()
    assert all(p.grad is None for p in fix(copy.copy(model)).parameters())

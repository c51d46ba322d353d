"""Operations over several layers at once give what they give one by one."""

from __future__ import annotations

import pytest
import torch

from fastclip import ops

B = 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_of_grams(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(2, 5, 4), (7, 3, 9), (4, 4, 4)]
    pairs = [(torch.randn(B, t, d).to(dtype), torch.randn(B, t, p).to(dtype)) for t, d, p in shapes]
    pairs[1][0][1] *= 1e-30  # nothing of its norm is left in float32 but what underflow can hide
    pairs[2][1][2] = torch.inf
    parts = [ops.ghost_parts(a, g, ops.LastInput()) for a, g in pairs]
    norms = [part for part in parts if isinstance(part, ops.LaterNorm)]
    assert len(norms) == len(pairs)
    together, single = norms[0].together(norms), torch.stack([n.raised() for n in norms])
    torch.testing.assert_close(together, single, rtol=1e-6, atol=0, equal_nan=True)
    assert (together[1] > 0).all()


def test_what_is_known_of_an_input_is_known_of_it_alone() -> None:
    last, x = ops.LastInput(), torch.randn(B, 4, 5)
    first, norm = last.gram(x), last.norm_sq(x)
    assert last.gram(x.view(B, 4, 5)) is first
    assert last.norm_sq(x.view(B, 4, 5)) is norm
    x.mul_(2)
    torch.testing.assert_close(last.norm_sq(x), 4 * norm)  # changed in place
    for other in (x[:, :2], x.transpose(1, 2), x.double(), torch.randn(B, 4, 5)):
        torch.testing.assert_close(last.gram(other), ops.half_gram(other))
        torch.testing.assert_close(last.norm_sq(other), ops.row_norm_sq(other))


def test_nothing_is_known_of_what_lies_nowhere() -> None:
    """Wrappers around other tensors have no address of their own."""

    class Wrapper(torch.Tensor):
        def data_ptr(self) -> int:
            return 0

    last = ops.LastInput()
    for x in (torch.randn(B, 4, 5), torch.randn(B, 4, 5)):
        wrapped = x.as_subclass(Wrapper)
        torch.testing.assert_close(last.norm_sq(wrapped), ops.row_norm_sq(x), check_dtype=False)
        torch.testing.assert_close(torch.Tensor(last.gram(wrapped)), ops.half_gram(x))


def test_two_threads_that_ask_in_turn() -> None:
    """One is interrupted in the middle by the other."""
    last, x, other = ops.LastInput(), torch.randn(B, 4, 5), torch.randn(B, 4, 5)
    known = last._known(x)
    last.norm_sq(other)
    known.norm_sq = ops.row_norm_sq(x)
    torch.testing.assert_close(last.norm_sq(other), ops.row_norm_sq(other))
    torch.testing.assert_close(last.norm_sq(x), ops.row_norm_sq(x))


@pytest.mark.parametrize("per_layer", [False, True])
def test_sums_of_kept_gradients(per_layer: bool) -> None:
    """A sample of scale 0 contributes 0 even where it is not finite."""
    torch.manual_seed(0)
    gradients = torch.randn(4, B, 5, dtype=torch.float64)
    scales = torch.rand(*(4,) * per_layer, B, dtype=torch.float64)
    scales[..., 1] = 0
    gradients[2, 1] = torch.nan
    own = scales if per_layer else scales.expand(4, B)
    expected = torch.stack([ops.kept_sum(g, s) for g, s in zip(gradients, own, strict=True)])
    assert expected.isfinite().all()
    torch.testing.assert_close(ops.kept_sums(gradients, scales), expected)


@pytest.mark.parametrize("dead", [False, True])
def test_scales_are_looked_at_once(dead: bool) -> None:
    scales, x = torch.tensor([[1.0, 0.0 if dead else 2.0]]), torch.full((2, 1), torch.inf)
    with ops.looked_at(scales):
        for known in (scales[0], scales.view(-1)):
            (found,) = ops.drop_zeroed(known, x)
            assert (found is x) is (not dead)
        (found,) = ops.drop_zeroed(torch.tensor([0.0, 1.0]), x)  # others are looked at
        assert found[0] == 0
    (found,) = ops.drop_zeroed(scales[0] * 0, x)
    assert (found == 0).all()


def test_norms_of_parts() -> None:
    """In float64, many parts: their order takes nothing away."""
    parts = [[torch.rand(B) for _ in range(3)] for _ in range(4)]
    norms = [ops.AddedNorm(own) for own in parts]
    exact = torch.stack([torch.stack(own).double().sum(0) for own in parts]).float()
    assert torch.equal(norms[0].together(norms), exact)
    assert torch.equal(norms[2].raised(), exact[2])
    small = ops.AddedNorm([torch.tensor([1.0]), *[torch.tensor([2.0**-25])] * 64])
    assert small.raised().item() > 1.0
    assert small.kind != norms[0].kind

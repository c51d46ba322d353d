"""What several ranks release is what one process would: noise once, epsilon, sensitivity, agreement."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from scipy.stats import binom, binomtest, chi2, chisquare

from tests.distributed import training, world
from tests.distributed.releases import SIGMA
from tests.distributed.training import BATCH, N

C = 0.5


SHARDED = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("fsdp of parts", "hsdp")]
FOUR = pytest.param((4, "hsdp"), marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["ddp", *SHARDED])
def found(request, tmp_path_factory) -> list[dict[str, Any]]:
    """Of two ranks."""
    folder = tmp_path_factory.mktemp("releases")
    return world.run(2, "tests.distributed.releases:releases", folder, request.param)


@pytest.fixture(scope="module")
def said(tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("refusals")
    return world.run(2, "tests.distributed.releases:of_wrappers", folder)


@pytest.fixture(scope="module", params=[(2, "ddp"), (2, "fsdp"), FOUR], ids=str)
def noises(request, tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    ranks, kind = request.param
    return world.run(
        ranks, "tests.distributed.releases:noise", tmp_path_factory.mktemp("noise"), kind
    )


@pytest.fixture
def noise(noises) -> dict[str, torch.Tensor]:
    """Gradients of three steps without rows, [3, n]."""
    return noises[0]


def test_all_ranks_have_the_same(noises) -> None:
    for name, value in noises[0].items():
        for other in noises[1:]:
            assert torch.equal(value, other[name])


@pytest.mark.parametrize("source", ["seeded", "generator", "secure"])
def test_noise_enters_once(noise, source: str) -> None:
    """Its variance is that of one process, in both halves; two-sided chi-square at 1e-6."""
    std = SIGMA * C / BATCH
    for part in noise[source].double().chunk(2, dim=1):
        n = part.numel()
        assert n > 1e5 / 2
        low, high = chi2.ppf([5e-7, 1 - 5e-7], n)
        assert low < float((part / std).square().sum()) < high


@pytest.mark.parametrize("source", ["seeded", "generator", "secure"])
def test_ranks_draw_from_streams_of_their_own(noise, source: str) -> None:
    """All were seeded alike: halves, and steps, are unrelated (|correlation| of 6 / sqrt(n) at most)."""
    drawn = noise[source].double()
    n = drawn.shape[1] // 2
    halves = [*drawn[:, :n], *drawn[:, -n:]]
    related = torch.corrcoef(torch.stack(halves)) - torch.eye(len(halves))
    assert float(related.abs().max()) < 6 / n**0.5
    assert drawn.unique().numel() > 0.95 * drawn.numel()  # wherever a stream would come again


def test_seeds_decide(noise) -> None:
    assert torch.equal(noise["seeded"], noise["seeded again"])
    assert not torch.equal(noise["seeded"], noise["another seed"])
    assert noise["secure"].unique().numel() > 0.99 * noise["secure"].numel()


def test_counts_and_thresholds_are_one(found) -> None:
    """Counts are reduced and get their noise once: all ranks hold the same, bit for bit."""
    for mine, other in zip(*(rank["counts"]["states"] for rank in found), strict=True):
        for name, value in mine.items():
            assert torch.equal(value, other[name]), name
    noisy = torch.cat([state["counts"] for state in found[0]["counts"]["states"]])
    assert len(noisy.unique()) == len(noisy)


def test_epsilon_is_that_of_one_process(found) -> None:
    module = training.model()
    made = training.private(module, sigma=SIGMA)
    training.run(made, module, 30)
    one = made[0].get_epsilon(1e-5)
    assert [rank["epsilon"]["epsilon"] for rank in found] == [one, one]


def test_empty_batches(found) -> None:
    """A third of the local batches are empty, and no rank waits for another."""
    drawn = [rank["empty"]["drawn"] for rank in found]
    without = sum(not step for rank in drawn for step in rank)
    assert without > 2 * 100 / 3
    for mine, other in zip(*(rank["empty"]["states"] for rank in found), strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_row_more_moves_the_sum_by_c(found, dtype: str) -> None:
    """bfloat16: what is released is rounded to 8 bits after the sums, which the bound is of."""
    moved = found[0]["one_row"][f"{dtype} True"] - found[0]["one_row"][f"{dtype} False"]
    rounding = found[0]["one_row"][f"{dtype} True"].norm() * 2**-8 * 2 if dtype == "bfloat16" else 0
    assert 0.9 * C < float(moved.norm()) <= C + float(rounding)


@pytest.mark.parametrize("way", ["torchs_sampler", "shuffled", "units", "weighted"])
def test_ways_to_draw(found, way: str) -> None:
    ranks = [rank[way] for rank in found]
    shares = [{row for step in rank["drawn"] for row in step} for rank in ranks]
    assert not shares[0] & shares[1]
    if way == "units":
        assert not {row // 3 for row in shares[0]} & {row // 3 for row in shares[1]}
    elif way == "torchs_sampler":
        assert "rate=0.1666" in ranks[0]["design"]
        assert "expected_batch_size=4," in ranks[0]["design"]
    elif way == "shuffled":
        assert "expected_batch_size=4" in ranks[0]["design"]
        assert shares[0] | shares[1] == set(range(24))
        assert all(len(step) == 2 for rank in ranks for step in rank["drawn"][:5])
    else:
        times = torch.zeros(N)
        for rank in ranks:
            for step in rank["drawn"]:
                times[step] += 1
        rates = torch.arange(N) / (N - 1) / 2
        assert float(((times / 200 - rates).abs() - 5 * (rates / 200).sqrt()).max()) <= 0


def test_units_are_clipped_whole(found) -> None:
    """A unit's rows are one contribution, as in one process."""
    ranks = [rank["units"] for rank in found]
    norms = [float(state["gradient"].norm()) * BATCH for state in ranks[0]["states"]]
    drawn = training.together(ranks)
    for norm, rows in zip(norms, drawn, strict=True):
        assert norm <= C * len({row // 3 for row in rows}) * (1 + 1e-9)


def test_batches_are_cut_on_all_ranks_together(found) -> None:
    """To 5 rows of both, each as often as any other; tests at a level of 1e-4."""
    first, second = (rank["cut"] for rank in found)
    assert not (first & second).any()
    assert not first[:, 1::2].any()
    both = first | second
    sizes = both.sum(1)
    assert int(sizes.max()) == 5
    often = binomtest(int((sizes == 5).sum()), len(sizes), float(binom.sf(4, N, 4 / N)))
    assert often.pvalue > 1e-4
    assert chisquare(both[sizes == 5].sum(0)).pvalue > 1e-4


REFUSED = {
    "sigma": "same noise_multiplier, got 1.0 on rank 0 and 2.0 on rank 1",
    "rate": "the same sampling design",
    "strategy": "same (clipping|max_grad_norm)",
    "data": "the same sampling design",
    "weights": "same weights",
    "static graph": "Omit static_graph",
    "apart": "noise_multiplier, got 1 on one and 2 on another",
    "syncs": "Leave the setting as make_private set it",
    "one rank alone": "max_samples_per_unit expects unit_ids",
    "clipped apart": "noise_std, got 1 on one and 2 on another",
    "another order": "samples of the data set, in one order",
    "chosen apart": "samples that may be drawn, in one order",
    "listed apart": "samples of the data set, in one order",
    "files apart": "samples of the data set, in one order, got 'Rows 23",
    "columns apart": "samples of the data set, in one order, got 'Rows 23",
    "units apart": "same unit_ids",
    "epochs apart": "the DistributedSampler's epoch, got 0 on one and 1 on another",
    "schedules apart": "digest of the optimizer's settings",
    "own order": "Pass a DistributedSampler of these ranks",
    "another's share": "rank 1 of 2",
    "padded": "drop_last=True",
    "few rows": "at least 2 samples, got",
    "loader again": "one rank's share of the samples already",
    "own seed": "order of the DistributedSampler",
}


ALONE = ("one rank alone", "another's share")
"""Refused by one rank, which tells the other."""


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(said, case: str) -> None:
    for number, rank in enumerate(said):
        told = rank["refusals"][case]
        assert re.search(REFUSED[case], told), told
        assert (case in ALONE and not number) == ("Rank 1 cannot train" in told), told


def test_cleanup_makes_ddp_ordinary_again(said) -> None:
    assert [rank["ordinary"] for rank in said] == [True, True]


def test_physical_order_of_ranks_is_one_process(found) -> None:
    """Without Poisson sampling, too, the ranks are one process on all their rows."""
    ranks = [rank["shuffled"] for rank in found]
    expected = training.replay(training.together(ranks), data=training.Rows(24))
    for mine, one in zip(ranks[1]["states"], expected, strict=True):
        torch.testing.assert_close(mine["weights"], one["weights"], rtol=1e-10, atol=1e-12)

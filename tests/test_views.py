"""Several views of a sample (`views=K`): their mean gradient is clipped once, one sample at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler

from fastclip import FastPrivacyEngine, clipping
from fastclip.errors import ArgumentError, ArgumentTypeError, BatchSizeError, GraphError, StepError
from tests.distributed.world import run
from tests.refusal import refused

N, C = 24, 0.3
Views = Callable[[Tensor, int], Tensor]


def image_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)
    ).double()


class Numbered(Dataset):
    """(number of the sample, image, label)."""

    def __init__(self, n: int = N, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, 1, 6, 6, generator=generator, dtype=torch.float64)
        self.y = torch.randint(3, (n,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[int, Tensor, Tensor]:
        return i, self.x[i], self.y[i]


def noisy(x: Tensor, views: int) -> Tensor:
    x = x.repeat_interleave(views, 0)
    return x + 0.5 * torch.randn_like(x)


def flipped(x: Tensor, views: int) -> Tensor:
    """Views that are made one after the other, and differ by their number."""
    made = [x.flip(-1) if k % 2 else x.roll(k, -2) for k in range(views)]
    return torch.stack(made, 1).flatten(0, 1)


def past_torch(x: Tensor, views: int) -> Tensor:
    rows = np.repeat(x.numpy(), views, 0)
    return torch.from_numpy(rows + 0.1 * np.random.default_rng(0).normal(size=rows.shape))


def stepped(model: nn.Module, optimizer: Any) -> tuple[list[Tensor], nn.Module]:
    """A step is made: the sums that it released, and the model as it was before."""
    sums = [p.summed_grad.clone() for p in model.parameters()]
    plain = image_model()
    plain.load_state_dict(model.state_dict())
    optimizer.step()
    return sums, plain


def start(views: int = 3, data: Dataset | None = None, **options: Any) -> tuple:
    torch.manual_seed(1)
    model = image_model()
    engine = FastPrivacyEngine(secure_mode=options.pop("secure", False))
    data = Numbered() if data is None else data
    own = ("collate_fn", "num_workers", "sampler")
    loader = {name: options.pop(name) for name in own if name in options}
    private, optimizer, batches = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=options.pop("batch_size", 6), **loader),
        **{"noise_multiplier": 0.0, "max_grad_norm": C, "views": views, **options},
    )  # fmt: skip
    return engine, model, private, optimizer, batches


def expected_sum(model: nn.Module, x: Tensor, y: Tensor, views: int, c: float = C) -> list[Tensor]:
    """One sample at a time: the gradient of the mean loss over its views, clipped, summed."""
    parameters = list(model.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for mine in range(0, len(x), views):
        loss = F.cross_entropy(model(x[mine : mine + views]), y[mine : mine + views])
        grads = torch.autograd.grad(loss, parameters)
        norm = torch.cat([g.flatten() for g in grads]).norm()
        for held, g in zip(total, grads, strict=True):
            held += min(1.0, c / float(norm)) * g
    return total


def check_steps(
    made: tuple, views: int, views_of: Views, passes: int = 2, reduction: str = "mean"
) -> list[int]:
    """Train, and compare every released sum; the numbers of samples of the steps."""
    _, model, private, optimizer, loader = made
    plain, sizes = image_model(), []
    for _ in range(passes):
        for batch in loader:
            x, y = batch[-2], batch[-1]
            rows = views_of(x, views)
            labels = y if len(y) == len(rows) else y.repeat_interleave(views)
            optimizer.zero_grad()
            F.cross_entropy(private(rows), labels, reduction=reduction).backward()
            sums = [p.summed_grad.clone() for p in model.parameters()]
            plain.load_state_dict(model.state_dict())
            optimizer.step()
            expected = expected_sum(plain, rows, labels, views)
            for found, own in zip(sums, expected, strict=True):
                assert torch.allclose(found, own, rtol=0, atol=1e-10 * max(1, len(x)))
            sizes.append(len(rows) // views)
    return sizes


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("views", [1, 2, 3])
@pytest.mark.parametrize("views_of", [noisy, flipped])
def test_released_sums(views_of: Views, views: int, reduction: str) -> None:
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    made = start(views, loss_reduction=reduction, criterion=criterion)
    assert check_steps(made, views, views_of, reduction=reduction)


def test_views_that_are_made_past_torch() -> None:
    """Whose their rows are is not seen: such views are made by collate_fn, which is asked."""
    with refused("in torch or in the data set", GraphError):
        check_steps(start(2), 2, past_torch)


def test_losses_of_rows() -> None:
    """A loss a row, averaged over all rows of the batch."""
    _, model, private, optimizer, loader = start(2)
    _, x, y = next(iter(loader))
    rows, labels = noisy(x, 2), y.repeat_interleave(2)
    losses = F.cross_entropy(private(rows), labels, reduction="none")
    losses.view(-1, 2).mean(1).mean().backward()
    sums, plain = stepped(model, optimizer)
    for found, own in zip(sums, expected_sum(plain, rows, labels, 2), strict=True):
        assert torch.allclose(found, own, rtol=0, atol=1e-10)


@given(
    views=st.integers(1, 4), n=st.integers(1, 5), features=st.integers(1, 4), times=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)  # fmt: skip
@settings(max_examples=12, deadline=None)
def test_any_shape(views: int, n: int, features: int, times: int, seed: int) -> None:
    """Layers whose norms are computed in other ways, on sequences too; all samples are drawn."""
    torch.manual_seed(seed)
    layers = nn.Linear(features, 3), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 2)
    model = nn.Sequential(*layers).double()
    plain = copy.deepcopy(model)
    data = TensorDataset(torch.randn(n, times, features, dtype=torch.float64))
    private, _, loader = FastPrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=n), noise_multiplier=0.0, max_grad_norm=C,
        sample_rate=1.0, expected_batch_size=n, views=views,
    )  # fmt: skip
    (x,) = next(iter(loader))
    rows = noisy(x, views)
    private(rows).square().sum((1, 2)).mean().backward()
    sums = [p.summed_grad for p in model.parameters()]
    total = [torch.zeros_like(p) for p in plain.parameters()]
    for mine in range(0, len(rows), views):
        loss = plain(rows[mine : mine + views]).square().sum((1, 2)).mean()
        grads = torch.autograd.grad(loss, list(plain.parameters()))
        norm = torch.cat([g.flatten() for g in grads]).norm()
        for held, g in zip(total, grads, strict=True):
            held += min(1.0, C / max(float(norm), 1e-300)) * g
    for found, own in zip(sums, total, strict=True):
        assert torch.allclose(found, own, rtol=0, atol=1e-9)


# Where views are made


def stacked(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Two views of each sample, in torch."""
    x = torch.stack([x for _, x, _ in samples])
    views = torch.stack([x, x.flip(-1) + torch.randn_like(x)], 1).flatten(0, 1)
    return views, torch.stack([y for *_, y in samples]).repeat_interleave(2)


def by_numpy(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Two views of each sample, past torch; labels not repeated."""
    made = [
        x.numpy() * np.random.uniform(0.5, 1.5) + np.random.normal(size=x.shape)
        for _, x, _ in samples for _ in range(2)
    ]  # fmt: skip
    return torch.from_numpy(np.stack(made)), torch.stack([y for *_, y in samples])


def views_apart(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x = torch.stack([x for _, x, _ in samples])
    return torch.cat([x, x.flip(-1)]), torch.stack([y for *_, y in samples]).repeat(2)


def apart_by_numpy(samples: list[Any]) -> tuple[Tensor, Tensor]:
    x = np.stack([x.numpy() for _, x, _ in samples])
    x = np.concatenate([x, x * np.random.uniform(0.5, 1.5)])
    return torch.from_numpy(x), torch.stack([y for *_, y in samples]).repeat(2)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate", [stacked, by_numpy])
def test_views_of_a_collate_function(collate: Any, workers: int) -> None:
    made = start(2, collate_fn=collate, num_workers=workers)
    assert check_steps(made, 2, lambda x, _: x, passes=1 if workers else 3)


@pytest.mark.parametrize("collate", [views_apart, apart_by_numpy])
def test_a_collate_function_that_lays_them_out_otherwise(collate: Any) -> None:
    with refused("views=2.*adjacent", BatchSizeError):
        *_, loader = start(2, collate_fn=collate, sample_rate=1.0, expected_batch_size=N)
        next(iter(loader))


def test_views_apart_in_the_loop() -> None:
    """Rows that are clipped as one sample's would be of several."""
    *_, private, _, loader = start(2, sample_rate=1.0, expected_batch_size=N)
    for _, x, y in loader:
        with refused("next to each other", GraphError):
            F.cross_entropy(private(torch.cat([x, x.flip(-1)])), y.repeat(2)).backward()


def test_rows_of_a_collate_function_in_another_order() -> None:
    """Whole samples may change places, rows of them may not."""
    for shift, fits in ((2, True), (1, False)):
        *_, private, optimizer, loader = start(
            2, Subset(Numbered(), [0, 1]), collate_fn=stacked, batch_size=2, sample_rate=1.0,
            expected_batch_size=2,
        )  # fmt: skip
        for x, y in loader:
            loss = F.cross_entropy(private(x.roll(shift, 0)), y.roll(shift, 0))
            if fits:
                loss.backward()
                optimizer.step()
            else:
                with refused("next to each other", GraphError):
                    loss.backward()


class Reads(nn.Module):
    """Python reads numbers of the batch, so that values are compared in the place of the proof."""

    def __init__(self) -> None:
        super().__init__()
        self.body = image_model()

    def forward(self, x: Tensor) -> Tensor:
        if float(x.abs().max()) > 1e6:
            raise ValueError("too large")
        return self.body(x)


def test_a_forward_that_values_prove() -> None:
    torch.manual_seed(1)
    model = Reads()
    private, optimizer, loader = FastPrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=C,
        data_loader=DataLoader(Numbered(), batch_size=6), noise_multiplier=0.0, views=2,
    )  # fmt: skip
    assert check_steps((None, model.body, private, optimizer, loader), 2, noisy)


class Recurrent(nn.Module):
    """On packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: nn.utils.rnn.PackedSequence) -> Tensor:
        return self.out(self.rnn(x)[1][0][0])


def test_packed_sequences() -> None:
    torch.manual_seed(1)
    model = Recurrent().double()
    plain = copy.deepcopy(model)
    private, optimizer, loader = FastPrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=C,
        data_loader=DataLoader(Numbered(), batch_size=6), noise_multiplier=0.0, views=2,
    )  # fmt: skip

    def packed(x: Tensor) -> nn.utils.rnn.PackedSequence:
        lengths = torch.tensor([3 + i % 4 for i in range(len(x))])
        return nn.utils.rnn.pack_padded_sequence(
            x.squeeze(1), lengths, batch_first=True, enforce_sorted=False
        )

    for _, x, y in loader:
        rows, labels = noisy(x, 2), y.repeat_interleave(2)
        optimizer.zero_grad()
        F.cross_entropy(private(packed(rows)), labels).backward()
        sums = [p.summed_grad.clone() for p in model.parameters()]
        plain.load_state_dict(model.state_dict())
        optimizer.step()
        whole = nn.utils.rnn.pad_packed_sequence(packed(rows), batch_first=True)[1]
        total = [torch.zeros_like(p) for p in plain.parameters()]
        for mine in range(0, len(rows), 2):
            own = nn.utils.rnn.pack_padded_sequence(
                rows[mine : mine + 2].squeeze(1), whole[mine : mine + 2], batch_first=True,
                enforce_sorted=False,
            )  # fmt: skip
            loss = F.cross_entropy(plain(own), labels[mine : mine + 2])
            grads = torch.autograd.grad(loss, list(plain.parameters()))
            norm = torch.cat([g.flatten() for g in grads]).norm()
            for held, g in zip(total, grads, strict=True):
                held += min(1.0, C / float(norm)) * g
        for found, expected in zip(sums, total, strict=True):
            assert torch.allclose(found, expected, rtol=0, atol=1e-9)


# Numbers of rows


@pytest.mark.parametrize(
    ("rows_of", "said"),
    [
        (lambda x: x, "views=3 expects 3 entries per sample"),
        (lambda x: x.repeat_interleave(2, 0), "views=3 expects 3 views of each"),
        (lambda x: x.repeat_interleave(3, 0)[:-1], "entries per sample"),
        (lambda x: x.repeat_interleave(3, 0)[3:], "every view of every sample"),
        (lambda x: x.repeat_interleave(6, 0), "views=K"),
    ],
)  # fmt: skip
def test_other_numbers_of_rows(rows_of: Callable[[Tensor], Tensor], said: str) -> None:
    *_, private, _, loader = start(3, sample_rate=1.0, expected_batch_size=N)
    _, x, _ = next(iter(loader))
    with refused(said, BatchSizeError):
        private(rows_of(x)).square().sum(1).mean().backward()


@pytest.mark.parametrize("placeholder", [False, True])
@pytest.mark.parametrize("collate", [None, stacked])
def test_empty_draws(collate: Any, placeholder: bool) -> None:
    data = Subset(Numbered(), range(3))
    options = {"collate_fn": collate} if collate else {}
    made = start(
        2, data, sample_rate=0.3, expected_batch_size=1, rand_on_empty=placeholder, **options
    )
    _, model, private, optimizer, loader = made
    empty = 0
    for _ in range(6):
        for batch in loader:
            x, y = batch[-2], batch[-1]
            rows, labels = (x, y) if collate else (noisy(x, 2), y.repeat_interleave(2))
            none = len(rows) == 0 or (placeholder and bool((x == 1).all()))
            assert len(rows) % 2 == 0
            optimizer.zero_grad()
            F.cross_entropy(private(rows), labels).backward()
            if none:
                empty += 1
                assert all(not p.summed_grad.any() for p in model.parameters())
            optimizer.step()
    assert empty


@pytest.mark.parametrize("collate", [None, stacked])
def test_physical_batches(collate: Any) -> None:
    """max_physical_batch_size counts samples, as all else does."""
    options = {"collate_fn": collate} if collate else {}
    _, model, private, optimizer, loader = start(2, **options)
    plain, largest = image_model(), 0
    for _ in range(2):
        held: list[tuple[Tensor, Tensor]] = []
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=4, optimizer=optimizer
        ) as parts:
            for batch in parts:
                x, y = batch[-2], batch[-1]
                rows, labels = (x, y) if collate else (noisy(x, 2), y.repeat_interleave(2))
                largest = max(largest, len(rows))
                optimizer.zero_grad()
                F.cross_entropy(private(rows), labels).backward()
                held.append((rows, labels))
                sums = [p.summed_grad.clone() for p in model.parameters()]
                plain.load_state_dict(model.state_dict())
                optimizer.step()
                if optimizer._is_last_step_skipped:
                    continue
                expected = expected_sum(plain, *(torch.cat(z) for z in zip(*held, strict=True)), 2)  # type: ignore[misc]
                for found, own in zip(sums, expected, strict=True):
                    assert torch.allclose(found, own, rtol=0, atol=1e-9)
                held = []
    assert largest == 8


# What is said of samples


def test_counts_norms_and_groups_are_of_samples() -> None:
    strategy = clipping.adaptive(count_noise_ratio=0.01)
    _, _, private, optimizer, loader = start(3, clipping=strategy, noise_multiplier=1e-3)
    _, x, y = next(iter(loader))
    F.cross_entropy(private(noisy(x, 3)), y.repeat_interleave(3)).backward()
    norms = optimizer.grad_state.per_sample_norms
    assert norms.shape == (len(x),)
    optimizer.step()
    beyond = float((norms > C).sum())
    noisy_count = float(optimizer.grad_state.clipping.noisy_counts.flatten()[0])
    assert min(abs(noisy_count - n) for n in (beyond, len(x) - beyond)) < 0.5


@pytest.mark.parametrize("each", [False, True])
def test_groups_of_samples(each: bool) -> None:
    """Either of each sample of the loader, or of each row of the model."""
    strategy = clipping.dpsgd_f(2)
    engine, _, private, optimizer, loader = start(2, clipping=strategy, noise_multiplier=1e-3)
    _, x, y = next(iter(loader))
    ids = (y > 0).long()
    engine.set_groups(ids.repeat_interleave(2) if each else ids)
    F.cross_entropy(private(noisy(x, 2)), y.repeat_interleave(2)).backward()
    optimizer.step()
    assert optimizer.grad_state.clipping.noisy_counts.shape[-1] >= 2


def test_per_layer_thresholds() -> None:
    thresholds = [0.1] * 6
    _, model, private, optimizer, loader = start(2, clipping="per_layer", max_grad_norm=thresholds)
    _, x, y = next(iter(loader))
    rows, labels = noisy(x, 2), y.repeat_interleave(2)
    F.cross_entropy(private(rows), labels).backward()
    sums, plain = stepped(model, optimizer)
    total = [torch.zeros_like(p) for p in plain.parameters()]
    for mine in range(0, len(rows), 2):
        loss = F.cross_entropy(plain(rows[mine : mine + 2]), labels[mine : mine + 2])
        grads = torch.autograd.grad(loss, list(plain.parameters()))
        for held, g in zip(total, grads, strict=True):
            held += min(1.0, 0.1 / float(g.norm())) * g
    for found, own in zip(sums, total, strict=True):
        assert torch.allclose(found, own, rtol=0, atol=1e-10)


def test_epsilon_and_batch_size_do_not_depend_on_views() -> None:
    found = []
    for views in (1, 4):
        engine, _, private, optimizer, loader = start(views, noise_multiplier=1.0)
        for _, x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(private(noisy(x, views)), y.repeat_interleave(views)).backward()
            optimizer.step()
        said = engine.mechanism(delta=1e-5)
        found.append((engine.get_epsilon(1e-5), optimizer.expected_batch_size, said.sample_rate,
                      said.unit, said.neighbors, len(loader)))  # fmt: skip
    assert found[0] == found[1]


def test_the_same_samples_are_drawn() -> None:
    """As without views: of a weighted sampler and of a subset, too."""
    weights = torch.rand(N, generator=torch.Generator().manual_seed(3)).double()
    weighted = WeightedRandomSampler(weights, N)
    subset = torch.utils.data.SubsetRandomSampler([5, 3, 9, 11, 2, 20])
    for sampler in (None, weighted, subset):
        drawn = []
        for views in (1, 2):
            *_, loader = start(views, **({} if sampler is None else {"sampler": sampler}))
            drawn.append([sorted(i.tolist()) for i, *_ in loader])
        assert drawn[0] == drawn[1]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_views_of_samples_of_units(reduction: str) -> None:
    """A patient's gradient is the mean, or the sum, of its samples' means over views."""
    ids = [i // 3 for i in range(N)]
    _, model, private, optimizer, loader = start(
        2, unit_ids=ids, unit_reduction=reduction, sample_rate=0.5, expected_batch_size=4
    )
    number, x, y = next(iter(loader))
    rows, labels = noisy(x, 2), y.repeat_interleave(2)
    F.cross_entropy(private(rows), labels).backward()
    sums, plain = stepped(model, optimizer)
    owners = torch.tensor(ids)[number].repeat_interleave(2)
    total = [torch.zeros_like(p) for p in plain.parameters()]
    for patient in owners.unique():
        mine = owners == patient
        loss = F.cross_entropy(plain(rows[mine]), labels[mine])
        loss = loss * (mine.sum() / 2 if reduction == "sum" else 1)
        grads = torch.autograd.grad(loss, list(plain.parameters()))
        norm = torch.cat([g.flatten() for g in grads]).norm()
        for held, g in zip(total, grads, strict=True):
            held += min(1.0, C / float(norm)) * g
    for found, own in zip(sums, total, strict=True):
        assert torch.allclose(found, own, rtol=0, atol=1e-10)


# The bound


def released(data: Dataset, views: int) -> Tensor:
    """The sum over all samples, each with large and unlike gradients in all of its views."""
    size = {"sample_rate": 1.0, "expected_batch_size": N, "batch_size": N}
    _, model, private, _, loader = start(views, data, **size)
    _, x, y = next(iter(loader))
    torch.manual_seed(5)
    noise = torch.randn(N + 1, views, *x.shape[1:], dtype=x.dtype)[: len(x)]
    rows = (x[:, None] * 30 + noise).flatten(0, 1)
    (F.cross_entropy(private(rows), y.repeat_interleave(views)) * 50).backward()
    return torch.cat([p.summed_grad.flatten() for p in model.parameters()]).clone()


@pytest.mark.parametrize("views", [2, 5])
def test_an_attack_by_one_sample(views: int) -> None:
    """Taken out, it moves the sum by C at most; replaced, by 2 C; and such samples reach both nearly."""
    data, other = Numbered(), Numbered()
    other.x[-1], other.y[-1] = -3 * other.x[-1], (other.y[-1] + 1) % 3
    whole = released(data, views)
    removed = (whole - released(Subset(data, range(N - 1)), views)).norm()
    replaced = (whole - released(other, views)).norm()
    assert C * 0.99 <= removed <= C * (1 + 1e-6)
    assert C * 0.5 <= replaced <= 2 * C * (1 + 1e-6)


# With other parts


def trained_by_a_rank() -> list[Tensor]:
    """Its share of one step, and what the sum over both became."""
    torch.manual_seed(1)
    model = image_model()
    wrapped = nn.parallel.DistributedDataParallel(model)
    private, optimizer, loader = FastPrivacyEngine().make_private(
        module=wrapped, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(Numbered(), batch_size=6), noise_multiplier=0.0, max_grad_norm=C,
        sample_rate=1.0, expected_batch_size=N, views=2,
    )  # fmt: skip
    before = [p.detach().clone() for p in model.parameters()]
    _, x, y = next(iter(loader))
    assert len(x) == N // 2
    F.cross_entropy(private(flipped(x, 2)), y.repeat_interleave(2)).backward()
    optimizer.step()
    return [(a - p.detach()) * N for a, p in zip(before, model.parameters(), strict=True)]


def test_ranks(tmp_path: Path) -> None:
    torch.manual_seed(1)
    plain, data = image_model(), Numbered()
    expected = expected_sum(plain, flipped(data.x, 2), data.y.repeat_interleave(2), 2)
    for sums in run(2, "tests.test_views:trained_by_a_rank", tmp_path):
        for found, own in zip(sums, expected, strict=True):
            assert torch.allclose(found, own, rtol=0, atol=1e-9)


def test_refusals() -> None:
    for views, error in ((0, ArgumentError), (2.5, ArgumentTypeError), (True, ArgumentTypeError)):
        with pytest.raises(error, match="views"):
            start(views)  # type: ignore[arg-type]
    with refused("views=2 expects Poisson sampling", ArgumentError):
        start(2, poisson_sampling=False)
    with refused("does not support views", ArgumentError):
        start(2, grad_sample_mode="hooks")


def test_a_step_of_the_engine() -> None:
    """It holds every view; to capture or to split it is refused."""

    def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    engine, model, private, optimizer, loader = start(2)
    _, x, y = next(iter(loader))
    rows, labels = noisy(x, 2), y.repeat_interleave(2)
    with refused("views=2", StepError):
        engine.make_step(private, losses, physical_batch=2)(rows, labels)
    engine.make_step(private, losses)(rows, labels)
    sums, plain = stepped(model, optimizer)
    for found, own in zip(sums, expected_sum(plain, rows, labels, 2), strict=True):
        assert torch.allclose(found, own, rtol=0, atol=1e-10)


def test_a_budget() -> None:
    """The noise that it affords is the same, whatever K is."""
    found = []
    for views in (1, 3):
        model = image_model()
        _, optimizer, _ = FastPrivacyEngine().make_private_with_epsilon(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(Numbered(), batch_size=6), max_grad_norm=C, views=views,
            target_epsilon=3.0, target_delta=1e-2, epochs=2,
        )  # fmt: skip
        found.append(optimizer.noise_multiplier)
    assert found[0] == found[1]

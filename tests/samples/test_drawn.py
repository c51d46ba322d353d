"""Random numbers that a model draws for its rows, and multiplies by a parameter."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.random import rand as imported
from torch import Tensor, nn

from tests.oracle import Batch, backward, make_private, norms, relative_error, sample_loss
from tests.refusal import refused

B, D = 4, 3


def uniform(x: Tensor) -> Tensor:
    return torch.rand(len(x), 1, dtype=x.dtype)


def normal(x: Tensor) -> Tensor:
    return x.new_empty(len(x), D).normal_()


def gamma(x: Tensor) -> Tensor:
    return torch.distributions.Gamma(*torch.ones(2, dtype=x.dtype)).sample((len(x), 1))


def dirichlet(x: Tensor) -> Tensor:
    return torch.distributions.Dirichlet(torch.ones(D, dtype=x.dtype)).sample((len(x),))


def numpys(x: Tensor) -> Tensor:
    return torch.from_numpy(np.random.rand(len(x), 1))


def pythons(x: Tensor) -> Tensor:
    return torch.tensor([[random.random()] for _ in x], dtype=x.dtype)


def numpys_own(x: Tensor) -> Tensor:
    return torch.from_numpy(imported(len(x), 1))


def seeded(x: Tensor) -> Tensor:
    return torch.rand(len(x), 1, dtype=x.dtype, generator=torch.Generator().manual_seed(1))


class Noisy(nn.Module):
    """StyleGAN's layer: x + beta times noise, one draw a row."""

    def __init__(self, noise: Callable[[Tensor], Tensor], beta: Tensor) -> None:
        super().__init__()
        self.first, self.head, self.noise = nn.Linear(D, D), nn.Linear(D, 2), noise
        self.beta = nn.Parameter(beta)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.head(torch.tanh(h + self.beta * self.noise(h)))


def build(noise: Callable[[Tensor], Tensor], beta: Tensor) -> Noisy:
    torch.manual_seed(0)
    return Noisy(noise, beta).double()


def start(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def own_norms(model: nn.Module, x: Tensor) -> Tensor:
    """Of every row's gradient, in one forward pass, whose draws are all rows'."""
    out, parameters = model(x), dict(model.named_parameters())
    rows = [
        torch.autograd.grad(
            sample_loss(out[i : i + 1]).sum(), parameters.values(), retain_graph=True
        )
        for i in range(len(x))
    ]
    return norms(dict(zip(parameters, map(torch.stack, zip(*rows, strict=True)), strict=True)))


@pytest.mark.parametrize(
    "noise",
    [uniform, normal, gamma, dirichlet, numpys, pythons],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("beta", [torch.zeros(1), torch.ones(D)], ids=["scalar", "features"])
def test_exact_under_the_draws_of_the_step(noise: Callable, beta: Tensor) -> None:
    model, x = build(noise, beta), torch.randn(B, D, dtype=torch.float64)
    twin = build(noise, beta)
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.1)
    for seed in range(2):
        optimizer.zero_grad()
        start(seed)
        backward(private, x)
        start(seed)
        assert relative_error(optimizer.per_sample_norms, own_norms(twin, x)) <= 1e-10


@pytest.mark.parametrize(
    ("noise", "why"), [(numpys_own, "torch's functions"), (seeded, "its position in the batch")]
)
def test_numbers_of_a_rows_own(noise: Callable, why: str) -> None:
    _, private, _, _ = make_private(build(noise, torch.ones(1)))
    with refused(why):
        backward(private, torch.randn(B, D, dtype=torch.float64))


def counted(x: Tensor) -> Tensor:
    return x * (1.01 if len(x) > 3 else 1.0)


def placed(x: Tensor) -> Tensor:
    return torch.cat([x[:3], 1.01 * x[3:]])


def steeper(x: Tensor) -> Tensor:
    """Only its gradient follows from how many there are."""
    return x * len(x) - (x * (len(x) - 1)).detach()


class Dropped(nn.Module):
    """What random numbers of the model's own must not hide."""

    def __init__(
        self, draw: Callable[[Tensor], Tensor], coupling: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, 2)
        self.draw, self.coupling = draw, coupling
        self.generator = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        if self.draw is held:
            h = h * torch.from_numpy(self.generator.random((len(h), 1)))
        return self.second(self.coupling(self.draw(h)))


def held(h: Tensor) -> Tensor:
    """The model draws from a generator of its own."""
    return h


def by_python(h: Tensor) -> Tensor:
    return h * random.uniform(1.0, 2.0)


def by_numpy(h: Tensor) -> Tensor:
    return h * torch.from_numpy(np.random.rand(len(h), 1))


def masked(h: Tensor) -> Tensor:
    return h * torch.randint(0, 2, (len(h), 1))


def leaky(h: Tensor) -> Tensor:
    return F.rrelu(h, training=True)


def shuffled(h: Tensor) -> Tensor:
    """Features, in an order that is one for all rows."""
    return h[:, torch.randperm(D)]


def ordered(h: Tensor) -> Tensor:
    """A mask of features in an order that is drawn, one for all rows."""
    order = torch.randperm(D).argsort()
    return h * torch.ones(D, D).tril(-1)[order][:, order].sum(0)


def again(h: Tensor) -> Tensor:
    """Until the number is small enough."""
    while (u := torch.rand(()).item()) > 0.3:
        pass
    return h * u


DRAWS = [
    F.dropout,
    held,
    by_python,
    by_numpy,
    masked,
    leaky,
    shuffled,
    ordered,
    again,
]


def dropped(draw: Callable, coupling: Callable = lambda h: h) -> Dropped:
    torch.manual_seed(0)
    return Dropped(draw, coupling).double()


@pytest.mark.parametrize("coupling", [counted, placed, steeper], ids=lambda f: f.__name__)
@pytest.mark.parametrize("draw", DRAWS, ids=lambda f: f.__name__)
@pytest.mark.one_in(6)
def test_couplings_behind_draws(draw: Callable, coupling: Callable) -> None:
    _, private, _, _ = make_private(dropped(draw, coupling))
    with refused("independently"):
        backward(private, torch.randn(8, D, dtype=torch.float64))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("draw", DRAWS, ids=lambda f: f.__name__)
def test_draws_without_a_coupling(draw: Callable) -> None:
    model, twin, x = dropped(draw), dropped(draw), torch.randn(8, D, dtype=torch.float64)
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.1)
    start(1)
    backward(private, x)
    start(1)
    assert relative_error(optimizer.per_sample_norms, own_norms(twin, x)) <= 1e-10


@pytest.mark.parametrize(
    "mask",
    [
        lambda h: F.dropout(torch.ones_like(h), 0.3),
        lambda h: torch.empty_like(h).bernoulli_(0.7),
        lambda h: torch.bernoulli(torch.full_like(h, 0.7)),
        lambda h: (torch.rand_like(h) < 0.7).to(h.dtype),
    ],
    ids=["dropout", "bernoulli_", "bernoulli", "rand"],
)
def test_a_mask_that_is_scaled_by_the_rest_of_it(mask: Callable[[Tensor], Tensor]) -> None:
    """As DropBlock does: how many entries of other rows are kept."""
    of_all = Dropped(lambda h: h * (m := mask(h)) * m.numel() / m.sum(), held).double()
    x = torch.randn(8, D, dtype=torch.float64)
    with refused("independently"):
        backward(make_private(of_all)[1], x)


@pytest.mark.parametrize(
    "number",
    [
        lambda h: torch.randperm(len(h))[0] + 1,
        lambda h: torch.randperm(len(h) + D).max(),
        lambda h: torch.rand(len(h)).sum(),
        lambda h: torch.rand_like(h).max(),
        lambda h: torch.randperm(D)[:1] / len(h),
        lambda h: 1 + torch.multinomial(torch.ones(len(h)), 1),
    ],
    ids=["row", "highest", "sum", "maximum", "divided", "choice"],
)
def test_a_number_for_all_that_follows_from_their_number(
    number: Callable[[Tensor], Tensor],
) -> None:
    """Drawn as often as there are rows, it says how many there are."""
    x = torch.randn(8, D, dtype=torch.float64)
    with refused("independently"):
        backward(make_private(Dropped(lambda h: h * number(h), held).double())[1], x)


@pytest.mark.parametrize("coupling", [counted, placed], ids=lambda f: f.__name__)
def test_values_that_only_say_what_is_drawn(coupling: Callable) -> None:
    model = dropped(coupling, lambda h: torch.normal(h, 0.1))
    _, private, _, _ = make_private(model)
    with refused("independently"):
        backward(private, torch.randn(8, D, dtype=torch.float64))


def test_numbers_that_cannot_be_stopped() -> None:
    _, private, _, _ = make_private(dropped(lambda h: h * numpys_own(h), counted))
    with refused("independently"):
        backward(private, torch.randn(8, D, dtype=torch.float64))


class Chosen(nn.Module):
    """Every row's length says how many of its entries are left out, which are drawn elsewhere."""

    def __init__(self, choose: Callable[[nn.Module, int, int], Any]) -> None:
        super().__init__()
        self.first, self.second, self.choose = nn.Linear(D, D), nn.Linear(D, 2), choose
        self.numpys, self.pythons = np.random.default_rng(0), random.Random(0)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        kept = torch.ones_like(h[..., :1])
        for row, length in zip(kept, lengths.tolist(), strict=True):
            row[torch.tensor(self.choose(self, length, length // 2), dtype=torch.int64)] = 0
        return self.second((h * kept).sum(1))


def until_apart(model: nn.Module, length: int, count: int) -> list[int]:
    """One by one: chance says how often is drawn, row by row."""
    found: dict[int, None] = {}
    while len(found) < count:
        found[np.random.randint(length)] = None
    return [*found]


def ragged() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 40, D, dtype=torch.float64), torch.tensor([40, 6, 31, 13, 22, 9, 37, 18])


CHOICES: dict[str, Callable[[Any, int, int], Any]] = {
    "numpy": lambda model, length, count: np.random.choice(length, count, replace=False),
    "permutation": lambda model, length, count: np.random.permutation(length)[:count],
    "python": lambda model, length, count: random.sample(range(length), count),
    "numpy's own": lambda model, length, count: model.numpys.choice(length, count, replace=False),
    "python's own": lambda model, length, count: model.pythons.sample(range(length), count),
}


@pytest.mark.parametrize("how", CHOICES)
def test_as_many_draws_as_a_row_says(how: str) -> None:
    """SpecAugment: what a row draws moves generators on, for the rows after it."""
    (x, lengths), twin = ragged(), Chosen(CHOICES[how]).double()
    model = copy.deepcopy(twin)
    _, private, optimizer, _ = make_private(model, max_grad_norm=0.1, batch_size=8)
    start(1)
    backward(private, Batch((x, lengths)))
    start(1)
    out, parameters = twin(x, lengths), dict(twin.named_parameters())
    rows = [
        torch.autograd.grad(
            sample_loss(out[i : i + 1]).sum(), parameters.values(), retain_graph=True
        )
        for i in range(len(x))
    ]
    truth = norms(dict(zip(parameters, map(torch.stack, zip(*rows, strict=True)), strict=True)))
    assert relative_error(optimizer.per_sample_norms, truth) <= 1e-10


@pytest.mark.parametrize("how", CHOICES)
def test_a_coupling_among_such_draws(how: str) -> None:
    def choose(model: nn.Module, length: int, count: int) -> Any:
        return CHOICES[how](model, length, count)

    class Shared(Chosen):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            h = x + 0.1 * self.first(x).mean(0, keepdim=True).detach()
            return super().forward(h, lengths)

    private = make_private(Shared(choose).double(), batch_size=8)[1]
    with refused("independently of the others|depends on the number of samples"):
        backward(private, Batch(ragged()))


def behind(h: Tensor) -> Tensor:
    return h - 0.1 * h.mean(0)


@pytest.mark.parametrize("coupling", [behind, placed], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "seldom",
    [
        lambda: torch.rand(()).item() < 0.1,
        lambda: torch.rand(1) > 0.9,
        lambda: torch.bernoulli(torch.tensor(0.1)).bool(),
        lambda: torch.randint(10, ()) == 9,
        lambda: random.random() < 0.1,
        lambda: np.random.uniform() > 0.9,
    ],
    ids=["rand", "high", "bernoulli", "randint", "python", "numpy"],
)
@pytest.mark.one_in(3)
def test_a_way_that_is_seldom_taken(seldom: Callable[[], bool], coupling: Callable) -> None:
    """The step that takes it is an error, whenever that is."""
    taken: list[bool] = []

    def use(h: Tensor) -> Tensor:
        taken.append(bool(seldom()))
        return coupling(h) if taken[-1] else h

    _, private, optimizer, _ = make_private(dropped(lambda h: h, use))
    start(0)
    with refused("independently|mixes samples|position in the batch"):
        for _ in range(300):
            backward(private, torch.randn(8, D, dtype=torch.float64))
            assert not taken[-1]
            optimizer.step()
            optimizer.zero_grad()


def test_a_seed_that_follows_from_the_batch() -> None:
    class Seeded(Chosen):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            np.random.seed(int(lengths.sum()))
            return super().forward(x, lengths)

    private = make_private(Seeded(CHOICES["numpy"]).double(), batch_size=8)[1]
    with refused("draw them with torch's functions"):
        backward(private, Batch(ragged()))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("folded", [False, True])
def test_draws_that_nothing_counts(folded: bool) -> None:
    class Folded(Chosen):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            kept = super().forward(x, lengths)
            return (x[..., :2] * kept[:, None]).flatten(0, 1) if folded else kept

    private = make_private(Folded(until_apart).double(), batch_size=8)[1]
    with refused("draw them with torch's functions.* See errors.html#random-numbers"):
        backward(private, Batch(ragged()))


@pytest.mark.slow
def test_spec_augment_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 4), num_feat_extract_layers=2,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2, num_labels=3,
        classifier_proj_size=8, feat_extract_norm="layer", layerdrop=0.0, hidden_dropout=0.0,
        attention_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    assert config.mask_time_prob > 0
    torch.manual_seed(0)
    twin = transformers.Wav2Vec2ForSequenceClassification(config).double().train()
    lengths = torch.tensor([4000, 1700, 3100, 2500])
    mask = (torch.arange(4000) < lengths[:, None]).long()
    x = torch.randn(4, 4000, dtype=torch.float64) * mask
    _, private, optimizer, _ = make_private(copy.deepcopy(twin), max_grad_norm=0.1)
    start(1)
    sample_loss(private(x, attention_mask=mask).logits).mean().backward()
    start(1)
    losses = sample_loss(twin(x, attention_mask=mask).logits)
    rows = [
        torch.autograd.grad(row, [*twin.parameters()], retain_graph=True, allow_unused=True)
        for row in losses
    ]
    truth = torch.stack(
        [torch.cat([g.flatten() for g in row if g is not None]).norm() for row in rows]
    )
    assert relative_error(optimizer.per_sample_norms, truth) <= 1e-8

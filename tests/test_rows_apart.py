"""Rows that are not apart are found whatever hides them: weights, batch, mode, step, call."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastclip.errors import FastclipError
from tests.oracle import (
    Batch,
    assert_sums,
    backward,
    check_exact,
    clipped_sum,
    make_private,
    per_sample_gradients,
    row_loss,
    summed,
)
from tests.refusal import refused

B, T, D = 4, 3, 6
Use = Callable[[nn.Module, Tensor], Tensor]


class Hidden(nn.Module):
    """Something between two layers, behind a gate, a scale or a head that lets nothing through yet."""

    def __init__(self, use: Use, behind: str) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 2)
        self.raw = nn.Parameter(torch.zeros(1, T, D))
        scale = {"zero gate": 0.0, "layer scale": 1e-6}.get(behind)
        self.scale = None if scale is None else nn.Parameter(torch.full((1, 1, D), scale))
        if behind == "zero head":
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)
        if behind == "small head":
            nn.init.normal_(self.head.weight, std=1e-8)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = self.use(self, h) if self.scale is None else h + self.scale * self.use(self, h)
        return self.head(h.mean(1))


def batch_norm(h: Tensor) -> Tensor:
    return F.batch_norm(h.flatten(1), None, None, training=True).view_as(h)


def routed(m: nn.Module, h: Tensor) -> Tensor:
    """An expert with room for two thirds of the rows: those with the largest first entry."""
    score = h[:, 0, 0]
    chosen = score.argsort(descending=True)[: max(1, 2 * len(h) // 3)]
    return h.index_put((chosen,), h[chosen] * score[chosen].sigmoid()[:, None, None])


COUPLINGS: dict[str, Use] = {
    "batch norm": lambda m, h: batch_norm(h),
    "centred": lambda m, h: h - h.mean(0),
    "one per cent": lambda m, h: h - 0.01 * h.mean(0),
    "one in ten thousand": lambda m, h: h + 1e-4 * h.mean(0),
    "detached statistics": lambda m, h: h / (1 + h.detach().std(0)),
    "before a layer": lambda m, h: m.second(h - h.mean(0)),
    "after a layer": lambda m, h: (y := m.second(h)) - 0.1 * y.mean(0),
    "sorted": lambda m, h: m.second(h.sort(0).values),
    "layer in another order": lambda m, h: m.second(h[(o := h[:, 0, 0].argsort())])[o.argsort()],
    "layer in a random order": lambda m, h: m.second(h[(o := torch.randperm(len(h)))])[o.argsort()],
    "mixup": lambda m, h: 0.7 * h + 0.3 * h[torch.randperm(len(h))],
    "routing with capacity": routed,
    "first row of a parameter": lambda m, h: h + m.raw[0],
    "mean of a parameter": lambda m, h: h * m.raw.mean(0) + m.raw.flip(0)[0],
    "norm of a parameter": lambda m, h: h + m.raw / m.raw.norm(),
    "number of rows": lambda m, h: h / len(h),
    "gradient of another row": lambda m, h: h + 0.01 * (h.roll(1, 0) - h.roll(1, 0).detach()),
}
BEHIND = ["nothing", "zero head", "small head", "zero gate", "layer scale"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_hidden_by_weights(coupling: str, behind: str, dtype: torch.dtype) -> None:
    model = Hidden(COUPLINGS[coupling], behind).to(dtype)
    x = torch.randn(6, T, D, dtype=dtype)
    if coupling in ("norm of a parameter", "mean of a parameter"):
        model.raw.data.normal_()
    private = make_private(model, optimizer_params=used(model))[1]
    for _ in range(2):  # and not half known after the first refusal
        with refused("computed from itself alone|batch dimension"):
            private(x)


def used(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("behind", BEHIND)
@pytest.mark.parametrize(
    "use",
    [
        lambda m, h: h,
        lambda m, h: m.second(h) * torch.sigmoid(h),
        lambda m, h: h + m.raw,
        lambda m, h: h - h.detach().amax(-1, keepdim=True),
        lambda m, h: h * h.mean((1, 2), keepdim=True),
    ],
)
def test_what_is_apart_is_exact(use: Use, behind: str) -> None:
    """The same models, without a coupling."""
    model = Hidden(use, behind).double()
    x = torch.randn(B, T, D).double()
    grads = per_sample_gradients(model, x)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    params = dict(model.named_parameters())
    private = make_private(model, max_grad_norm=0.1)[1]
    backward(private, x)
    assert all(torch.equal(before[n], p) for n, p in model.state_dict().items())
    assert_sums(summed(params), clipped_sum(grads, 0.1), 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """A coupling of 0.1%, below the rounding of the values, shows in the gradients."""
    x = torch.randn(6, T, D).to(dtype)
    make_private(model := Hidden(lambda m, h: m.second(h), "nothing").to(dtype))[1](x)
    assert model is not None
    private = make_private(Hidden(lambda m, h: h + 1e-3 * h.roll(1, 0), "nothing").to(dtype))[1]
    with refused("computed from itself alone"):
        private(x)


class Branching(nn.Module):
    """Couples rows where its flag is up, in training mode alone, or from some call on."""

    def __init__(self, when: Callable[[Branching], bool]) -> None:
        super().__init__()
        self.first, self.head, self.when = nn.Linear(D, D), nn.Linear(D, 2), when
        self.warm, self.calls, self.stage = False, 0, "begin"

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        h = torch.tanh(self.first(x))
        return self.head(h - 0.5 * h.mean(0) if self.when(self) else h)


def step(private: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    backward(private, x)
    optimizer.step()


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (lambda: torch.randn(1, D), "one row"),
        (lambda: torch.randn(1, D).expand(5, D), "equal rows"),
        (lambda: torch.zeros(0, D), "no row"),
        (lambda: torch.zeros(2, D), "zeros"),
    ],
)
def test_a_first_batch_that_says_nothing(first: Callable[[], Tensor], why: str) -> None:
    """The rows are held against each other at once, or when there are some; in any case."""
    private, optimizer = make_private(Branching(lambda m: True))[1:3]
    with refused("computed from itself alone"):
        step(private, optimizer, first())
        step(private, optimizer, torch.randn(3, D))


def test_a_first_call_in_eval_mode() -> None:
    private, optimizer = make_private(Branching(lambda m: m.training))[1:3]
    private.eval()
    private(torch.randn(B, D))
    private.train()
    with refused("computed from itself alone"):
        step(private, optimizer, torch.randn(B, D))


@pytest.mark.parametrize("state", ["warm", "stage", "calls"])
def test_a_branch_that_comes_later(state: str) -> None:
    when = {
        "warm": lambda m: m.warm, "stage": lambda m: m.stage == "end", "calls": lambda m: m.calls > 3,
    }  # fmt: skip
    model = Branching(when[state])
    private, optimizer = make_private(model)[1:3]
    for _ in range(3):
        step(private, optimizer, torch.randn(B, D))
    assert model.calls == 3  # looks leave no trace
    model.warm, model.stage = True, "end"
    with refused("computed from itself alone"):
        step(private, optimizer, torch.randn(B, D))


def test_more_rows_than_before() -> None:
    """The first two of at least five rows are mixed: two rows alone are not."""

    def use(m: nn.Module, h: Tensor) -> Tensor:
        two = h[:2].mean(0, True).expand(2, -1, -1)
        return torch.cat([two, h[2:]]) if len(h) > 4 else h

    private, optimizer = make_private(Hidden(use, "nothing"))[1:3]
    with refused("computed from itself alone"):
        for b in (2, 3, 8):
            step(private, optimizer, torch.randn(b, T, D))


class LatePositions(nn.Module):
    """A position table in a branch that is reached later."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.first, self.head, self.rank, self.calls = nn.Linear(D, D), nn.Linear(D, 2), rank, 0
        self.table, self.on = nn.Embedding(9, D), False

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.on:
            ids = torch.arange(x.shape[1])
            h = h + self.table(ids if self.rank == 1 else ids[None])
        return self.head(torch.tanh(h)).mean(1)


@pytest.mark.parametrize("t", [4, 5])
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("seen", [True, False])
def test_a_position_table_reached_late(rank: int, t: int, seen: bool) -> None:
    """Exact, also where t equals b and the flag is one that nobody watches."""
    model = LatePositions(rank).double()
    x = torch.randn(4, t, D).double()
    params = dict(model.named_parameters())
    private, optimizer = make_private(model, lr=0.0)[1:3]
    step(private, optimizer, x)
    if seen:
        model.on = True
    else:
        model.__class__ = type("Other", (LatePositions,), {"on": True})
        del model.on
    expected = clipped_sum(per_sample_gradients(_plain(model), x), 1.0)
    optimizer.zero_grad()
    backward(private, x)
    assert_sums(summed(params), expected, 1e-10)


class LateParameter(nn.Module):
    """A raw parameter in a branch that nothing announces."""

    switched: list[int] = []

    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.branch, self.head = Bias(use), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.branch(x) if self.switched else x).mean(1)


class Bias(nn.Module):
    def __init__(self, use: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.raw, self.use = nn.Parameter(torch.randn(1, T, D)), use

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x + self.use(self.raw))


@pytest.mark.parametrize("apart", [True, False])
def test_a_parameter_reached_late(apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its first row's expansion alone no row but the first would be credited."""
    monkeypatch.setattr(LateParameter, "switched", [1])
    model = LateParameter((lambda p: p) if apart else (lambda p: p[0])).double()
    x = torch.randn(B, T, D).double()
    expected = clipped_sum(per_sample_gradients(model, x), 1.0)
    LateParameter.switched.clear()
    params = dict(model.named_parameters())
    private, optimizer = make_private(model, lr=0.0)[1:3]
    step(private, optimizer, x)
    LateParameter.switched.append(1)
    optimizer.zero_grad()
    if not apart:
        with refused("computed from itself alone"):
            private(x)
        return
    backward(private, x)
    assert_sums(summed(params), expected, 1e-10)


def _plain(model: LatePositions) -> LatePositions:
    twin = LatePositions(model.rank).double()
    twin.load_state_dict(model.state_dict())
    twin.on = True
    return twin


class WithMethods(nn.Module):
    """Layers that are reached by methods other than `forward`."""

    rate = 3
    config = {"classes": 2}

    def __init__(self, t: int = T) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(D, D), nn.Tanh())
        self.head, self.table = nn.Linear(D, 2), nn.Embedding(9, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.body(x) + self.table(torch.arange(x.shape[1])[None])

    def decode(self, h: Tensor) -> Tensor:
        return self.head(torch.tanh(h)).mean(1)

    def folded(self, x: Tensor) -> Tensor:
        return self.decode(self.body(x.flatten(0, 1)).view(x.shape))

    def mixed(self, x: Tensor) -> Tensor:
        return self.decode(self.body(x - x.mean(0)))

    @property
    def classes(self) -> int:
        return self.config["classes"]

    @staticmethod
    def double_of(x: int) -> int:
        return 2 * x


@pytest.mark.parametrize("wrap", [True, False])
def test_methods_of_the_model(wrap: bool) -> None:
    """Exact: one after the other, with what has no samples expanded."""
    model, x = WithMethods().double(), torch.randn(B, T, D).double()
    expected = clipped_sum(per_sample_gradients(model, x), 0.1)
    params = dict(model.named_parameters())
    private = make_private(model, max_grad_norm=0.1, wrap_model=wrap)[1]
    caller = private if wrap else model
    row_loss(caller.decode(caller.encode(x))).mean().backward()
    assert_sums(summed(params), expected, 1e-10)
    assert (caller.rate, caller.config, caller.classes) == (3, {"classes": 2}, 2)
    assert caller.double_of(4) == 8
    assert caller.encode.__name__ == "encode"
    with pytest.raises(AttributeError):
        _ = caller.nothing_of_this_name
    private.cleanup()
    assert "encode" not in vars(model)


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("method", ["folded", "mixed"])
@pytest.mark.parametrize("known", [True, False])
def test_methods_that_do_not_keep_rows_apart(method: str, wrap: bool, known: bool) -> None:
    model, x = WithMethods(), torch.randn(B, T, D)
    private = make_private(model, wrap_model=wrap)[1]
    caller = private if wrap else model
    if known:
        caller(x)
    with pytest.raises(FastclipError):
        row_loss(getattr(caller, method)(x)).mean().backward()


class Trainable(WithMethods):
    """A model that trains itself, as Lightning's do: past its own forward."""

    def fit(self, x: Tensor, optimizer, steps: int) -> None:
        for _ in range(steps):
            self.step(x, optimizer)

    def step(self, x: Tensor, optimizer) -> None:
        optimizer.zero_grad()
        row_loss(self.decode(self.encode(x))).mean().backward()
        optimizer.step()

    def step_with(self, optimizer, closure: Callable) -> None:
        optimizer.zero_grad()
        closure().backward()
        optimizer.step()

    def loss_of(self, x: Tensor, use: str = "encode") -> Tensor:
        return row_loss(self.decode(getattr(self, use)(x))).mean()


@pytest.mark.parametrize("how", ["fit", "closure"])
def test_methods_that_train(how: str) -> None:
    """What they call is looked at, not they: nothing is trained twice, nor refused."""
    x = torch.randn(B, T, D).double()
    model = Trainable().double()
    expected = dict(copy.deepcopy(model).named_parameters())
    for _ in range(2):
        other = copy.deepcopy(model)
        for name, p in other.named_parameters():
            p.data.copy_(expected[name])
        sums = clipped_sum(per_sample_gradients(other, x), 0.1)
        for name, p in expected.items():
            p.data -= 0.1 * sums[name] / B
    engine, private, optimizer, _ = make_private(model, max_grad_norm=0.1)
    if how == "fit":
        private.fit(x, optimizer, 2)
    else:
        for _ in range(2):
            private.step_with(optimizer, lambda: private.loss_of(x))
    assert [h[2] for h in engine.accountant.history] == [2]
    found = dict(model.named_parameters())
    for name, p in expected.items():
        assert torch.allclose(found[name], p, rtol=0, atol=1e-12), name


@pytest.mark.parametrize("use", ["folded_rows", "mixed_rows"])
def test_methods_that_train_on_what_is_not_apart(use: str) -> None:
    class Coupled(Trainable):
        def folded_rows(self, x: Tensor) -> Tensor:
            return self.body(x.flatten(0, 1)).view(x.shape)

        def mixed_rows(self, x: Tensor) -> Tensor:
            return self.body(x - x.mean(0))

    private, optimizer = make_private(Coupled())[1:3]
    x = torch.randn(B, T, D)
    with pytest.raises(FastclipError):
        private.step_with(optimizer, lambda: private.loss_of(x, use))


class Part(nn.Module):
    """A part of a model, called by itself, that folds rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).view(x.shape)


def test_a_part_called_by_itself() -> None:
    model = nn.Sequential(Part(), nn.Linear(D, 2))
    make_private(model)
    with pytest.raises(FastclipError):
        row_loss(model[1](model[0](torch.randn(B, T, D)))).mean().backward()


def test_a_part_called_by_itself_is_exact() -> None:
    model, x = WithMethods().double(), torch.randn(B, D).double()
    grads = per_sample_gradients(nn.Sequential(model.body, model.head), x)
    params = dict(model.named_parameters())
    make_private(model, max_grad_norm=0.1)
    row_loss(model.head(model.body(x))).mean().backward()
    found = [summed(params)[f"{n}.weight"] for n in ("body.0", "head")]
    expected = [clipped_sum(grads, 0.1)[f"{n}.weight"] for n in ("0.0", "1")]
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


class Dropping(nn.Module):
    """Functional dropout, stochastic depth of rows, and a layer that is left out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra, self.head = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.first(x), 0.3, self.training)
        keep = torch.rand(len(h), 1, 1, dtype=h.dtype) > 0.3
        h = h + keep * torch.tanh(h)
        if torch.rand(()) > 0.5:
            h = self.extra(h)
        return self.head(h).mean(1)


def test_random_parts_are_no_coupling() -> None:
    private, optimizer = make_private(Dropping())[1:3]
    for _ in range(8):  # the layer that is left out is met at some time
        step(private, optimizer, torch.randn(B, T, D))


def test_a_layer_for_large_batches_alone() -> None:
    """No run on a few rows shows where its samples are."""
    use: Use = lambda m, h: m.second(h) if len(h) > 8 else h  # noqa: E731
    private = make_private(Hidden(use, "nothing"))[1]
    with refused("any number of rows"):
        private(torch.randn(9, T, D))


def test_looks_are_few() -> None:
    """At most ten forward passes of at most eight rows at the first step, none at the next."""
    seen: list[int] = []
    model = nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 2))
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    inner = LatePositions(2)
    inner.on, inner.first = True, model
    inner.head = nn.Linear(2, 2)
    inner.table = nn.Embedding(9, 2)
    private, optimizer = make_private(inner)[1:3]
    step(private, optimizer, torch.randn(16, T, D))
    assert seen[-1] == 16
    assert len(seen) <= 11
    assert max(seen[:-1]) <= 8
    seen.clear()
    for b in (16, 32, 5, 1):
        step(private, optimizer, torch.randn(b, T, D))
    assert seen == [16, 32, 5, 1]


def test_nothing_of_a_look_is_held() -> None:
    """Softmax saves its own output: a graph that holds it with its graph is never freed."""
    seen: list[weakref.ref] = []

    class Saves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(D, D), nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x).softmax(-1)
            seen.append(weakref.ref(h))
            return self.second(h)

    private, optimizer = make_private(Saves())[1:3]
    step(private, optimizer, torch.randn(B, D))
    gc.collect()
    assert len(seen) >= 8
    assert [ref for ref in seen if ref() is not None] == []


def test_what_a_forward_pass_leaves_on_modules_is_put_back() -> None:
    class Stash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(D, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.count = getattr(self, "count", 0) + 1
            self.total += len(x)
            self.seen.append(len(x))
            self.last = x
            return self.layer(self.last)

    model, x = Stash(), torch.randn(B, D)
    model.total, model.seen = torch.zeros(()), []
    with torch.inference_mode():
        model.earlier = torch.zeros(3)
    make_private(model)[1](x)
    assert model.count == 1
    assert model.last is x
    assert (model.total, model.seen) == (B, [B])


def test_shared_ids_and_a_late_branch_with_packed_rows() -> None:
    """A batch whose inputs hold ids for all rows at once, of the batch's size by accident."""
    model = LatePositions(1).double()
    model.on = True
    check_exact(model, Batch((torch.randn(5, 5, D),)), dtype=torch.float64, C=0.05)


class WantsPlainInputs(nn.Module):
    """Does to its input what cannot be done to one whose gradient is asked for."""

    def __init__(self, how: str, use: Use) -> None:
        super().__init__()
        self.how, self.inner = how, Hidden(use, "nothing")

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "numpy":
            assert x.numpy().ndim == 3
        if self.how == "requires_grad":  # as transformers' Wav2Vec2 does
            x.requires_grad = True
        return self.inner(x)


@pytest.mark.parametrize("how", ["numpy", "requires_grad"])
def test_models_that_want_plain_inputs(how: str) -> None:
    """They train; what is coupled behind their first layer is still refused."""
    private, optimizer = make_private(WantsPlainInputs(how, lambda m, h: m.second(h)))[1:3]
    for _ in range(2):
        step(private, optimizer, torch.randn(B, T, D))
    coupled = make_private(WantsPlainInputs(how, lambda m, h: h - 3e-5 * h.mean(0)))[1]
    with refused("from itself alone"):
        coupled(torch.randn(B, T, D))

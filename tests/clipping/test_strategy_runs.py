"""Strategies in whole runs: physical batches, groups, checkpoints, what is refused."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
from opacus.optimizers import DPOptimizer
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, clipping
from fastclip.clipping import Automatic, Clipping, Constant, Global, PerLayer, Quantile
from fastclip.errors import ArgumentError, ArgumentTypeError, StepError
from tests.networks import mlp
from tests.oracle import backward, make_private, sample_loss
from tests.strategies import PRESETS, STEPS

presets = pytest.mark.parametrize("name", PRESETS)
SPLIT = [name for name, strategy in PRESETS.items() if not strategy.threshold.same_step]
BATCHES = [5, 3, 0, 1, 8, 4]
SIGMA = 0.7


def rows(n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, 6, dtype=torch.float64, generator=generator(seed))


def groups_of(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x)) % 3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def start(strategy: object, **kwargs):
    """(engine, model, private, optimizer) with noise from a seeded generator."""
    torch.manual_seed(0)
    model = mlp()
    options = {"noise_multiplier": SIGMA, "noise_generator": generator(9), **kwargs}
    engine, private, optimizer, _ = make_private(model, clipping=strategy, **options)
    return engine, model, private, optimizer


def one_step(engine, private, optimizer, x: torch.Tensor, *sizes: int) -> None:
    """One logical batch, in one piece or in physical batches of `sizes`."""
    parts = x.split(sizes) if sizes else [x]
    ids = groups_of(x).split(sizes) if sizes else [groups_of(x)]
    for i, (part, own) in enumerate(zip(parts, ids, strict=True)):
        if sizes:
            optimizer.signal_skip_step(i < len(parts) - 1)
        engine.set_groups(own)
        backward(private, part)
        optimizer.step()
        optimizer.zero_grad()


def train(run, batches: list[torch.Tensor]) -> None:
    engine, _, private, optimizer = run
    for x in batches:
        one_step(engine, private, optimizer, x)


def state_of(run) -> dict[str, torch.Tensor]:
    _, model, _, optimizer = run
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    values["threshold"] = optimizer.threshold.clone()
    values["next"] = optimizer.grad_state.clipping.next.threshold.clone()
    if optimizer.noisy_counts is not None:
        values["counts"] = optimizer.noisy_counts.clone()
    return values


# Physical batches


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SPLIT)
def test_split_batches_are_whole_batches(name: str) -> None:
    """Counts accumulate, thresholds move and noise is drawn once: the same run, however split."""
    whole, split = start(PRESETS[name]), start(PRESETS[name])
    for seed in range(4):
        x = rows(7, seed=seed)
        one_step(whole[0], whole[2], whole[3], x)
        one_step(split[0], split[2], split[3], x, 3, 2, 2)
        for key, value in state_of(whole).items():
            assert torch.allclose(state_of(split)[key], value, rtol=1e-9, atol=1e-12), key


@pytest.mark.parametrize("name", ["adaptive", "soft_ada_clip", "dpsgd_f_previous", "auto_s"])
def test_thresholds_move_only_in_real_steps(name: str) -> None:
    engine, _, private, optimizer = start(PRESETS[name])
    state = optimizer.grad_state.clipping
    before = state.next.threshold.clone()
    for i in range(3):
        optimizer.signal_skip_step(i < 2)
        engine.set_groups(groups_of(rows(4)))
        backward(private, rows(4))
        assert torch.equal(optimizer.threshold, before)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(state.next.threshold, before) == (i < 2)
        assert (optimizer.noisy_counts is None) == (i < 2)


@pytest.mark.parametrize("name", ["dpsgd_f", "naive_reweighting"])
def test_same_step_refuses_split_batches(name: str) -> None:
    engine, model, private, optimizer = start(PRESETS[name])
    with pytest.raises(StepError, match='thresholds="previous_step"'):
        optimizer.signal_skip_step(True)
    # Two passes without any signal are two physical batches, too.
    engine.set_groups(groups_of(rows(4)))
    backward(private, rows(4))
    sums = [p.summed_grad.clone() for p in model.parameters()]
    engine.set_groups(groups_of(rows(4)))
    with pytest.raises(StepError, match='thresholds="previous_step"'):
        backward(private, rows(4))
    for p, before in zip(model.parameters(), sums, strict=True):
        assert torch.equal(p.summed_grad, before)


def test_memory_manager_with_poisson_sampling() -> None:
    """Opacus' own adaptive clipping cannot be split; this one gives the same run either way."""
    data = TensorDataset(rows(64), torch.arange(64) % 3)

    def run(limit: int) -> list[float]:
        torch.manual_seed(0)
        model = mlp()
        engine, private, optimizer, loader = make_private(
            model, clipping=Clipping(threshold=Quantile(num_groups=3)), noise_multiplier=SIGMA,
            noise_generator=generator(9), poisson_sampling=True, dataset=data, batch_size=16,
            generator=generator(1),
        )  # fmt: skip
        found = []
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=limit, optimizer=optimizer
        ) as physical:
            for _ in range(2):
                for x, ids in physical:
                    optimizer.zero_grad()
                    engine.set_groups(ids)
                    sample_loss(private(x)).mean().backward()
                    optimizer.step()
                    found += optimizer.threshold.tolist()
        found += [p.sum().item() for p in model.parameters()]
        assert len(engine.accountant.history) == 1
        assert engine.accountant.history[0][2] == 8
        return found

    assert run(5)[-4:] == pytest.approx(run(64)[-4:], rel=1e-9)


def test_discarded_batch_is_not_counted() -> None:
    """zero_grad() without a step clears the counts with the sums."""
    _, _, private, optimizer = start(clipping.adaptive(), noise_multiplier=0.0)
    backward(private, rows(9))
    optimizer.zero_grad()
    backward(private, rows(4))
    count = (optimizer.per_sample_norms <= optimizer.threshold).sum().item()
    optimizer.step()
    assert optimizer.noisy_counts.item() == count


def test_accumulated_batches_share_the_denominator() -> None:
    """Two batches under one step: B counts twice, as it does for the gradient."""
    _, _, private, optimizer = start(clipping.adaptive(), noise_multiplier=0.0)
    for _ in range(2):
        backward(private, rows(4))
    optimizer.step()
    fraction = optimizer.noisy_counts.item() / (2 * 4)
    expected = math.exp(-0.2 * (fraction - 0.5))
    assert optimizer.max_grad_norm == pytest.approx(expected, rel=1e-12)


def test_placeholder_rows_are_not_counted() -> None:
    """An empty batch under rand_on_empty: one placeholder row, in no group and in no count."""
    data = TensorDataset(rows(8), torch.arange(8) % 3)
    torch.manual_seed(0)
    engine, private, optimizer, loader = make_private(
        mlp(), clipping=clipping.dpsgd_f(3), dataset=data, batch_size=1, poisson_sampling=True,
        rand_on_empty=True, generator=generator(3),
    )  # fmt: skip
    sizes = []
    for x, ids in loader:
        optimizer.zero_grad()
        engine.set_groups(ids)
        sample_loss(private(x)).mean().backward()
        optimizer.step()
        sizes.append(0 if bool(((x == 0) | (x == 1)).all()) else len(x))
        assert optimizer.noisy_counts.sum().item() == sizes[-1]
    assert 0 in sizes


# Groups


def test_groups_are_needed_for_every_pass() -> None:
    """A stale one must never serve another batch, not even one of the same size."""
    engine, model, private, optimizer = start(clipping.dpsgd_f(3))
    with pytest.raises(StepError, match="set_groups"):
        backward(private, rows(4))
    one_step(engine, private, optimizer, rows(4))
    with pytest.raises(StepError, match="set_groups"):
        backward(private, rows(4))
    assert all(p.summed_grad is None for p in model.parameters())
    one_step(engine, private, optimizer, rows(4))  # nothing is lost


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        (torch.tensor([0, 1, 3, 0]), ArgumentError, "groups from 0 to 2.*got values outside"),
        (torch.tensor([0, -1, 1, 0]), ArgumentError, "got values outside"),
        (torch.tensor([0.0, 1, 2, 0]), ArgumentTypeError, "int64"),
        (torch.zeros(4, 1, dtype=torch.int64), ArgumentTypeError, r"\(4, 1\)"),
        ([0, 1, 2, 0], ArgumentTypeError, r"int64 tensor \[b\], got list\.$"),
    ],
)
def test_wrong_groups(ids, error, message) -> None:
    engine, *_ = start(clipping.dpsgd_f(3))
    with pytest.raises(error, match=message):
        engine.set_groups(ids)


def test_wrong_number_of_groups() -> None:
    engine, _, private, _ = start(clipping.dpsgd_f(3))
    engine.set_groups(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(StepError, match="3 groups for a backward pass of 4"):
        backward(private, rows(4))


def test_other_strategies_ignore_groups() -> None:
    """So that a training loop may always call set_groups."""
    engine, _, private, optimizer = start("flat")
    engine.set_groups(torch.tensor([7, 7]))
    with pytest.raises(ArgumentTypeError, match="int64"):
        engine.set_groups(torch.zeros(4, dtype=torch.complex64))
    one_step(engine, private, optimizer, rows(4))


# Checkpoints


@pytest.mark.one_in(3)
@presets
def test_resumed_run_is_the_run_that_never_stopped(name: str) -> None:
    """Bit for bit, once the test has restored the generator, which no checkpoint holds."""
    batches = [rows(n, seed=i) for i, n in enumerate(BATCHES)]
    through = start(PRESETS[name])
    train(through, batches)

    first = start(PRESETS[name])
    train(first, batches[:3])
    file = io.BytesIO()
    first[0].save_checkpoint(path=file, module=first[2], optimizer=first[3])
    noise = first[3].generator.get_state()
    file.seek(0)

    second = start(PRESETS[name])
    second[0].load_checkpoint(path=file, module=second[2], optimizer=second[3])
    second[3].generator.set_state(noise)
    train(second, batches[3:])
    for key, value in state_of(through).items():
        assert torch.equal(state_of(second)[key], value), key
    assert second[0].accountant.history == through[0].accountant.history


def tensors_in(value) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors_in(v)]
    return [t for v in value for t in tensors_in(v)] if isinstance(value, (list, tuple)) else []


@pytest.mark.one_in(2)
@presets
def test_checkpoints_hold_nothing_secret(name: str) -> None:
    """No generator, no multiplier, and in the middle of a logical batch no raw count."""
    run = start(PRESETS[name])
    train(run, [rows(4)])
    engine, _, private, optimizer = run
    noise = optimizer.grad_state.clipping.noise
    before = optimizer.state_dict()
    engine.set_groups(groups_of(rows(8)))
    backward(private, rows(8))
    after = optimizer.state_dict()
    assert pickle.dumps(after["state"]) == pickle.dumps(before["state"])
    key = "fastclip_clipping"
    assert (key in after) == (not PRESETS[name].constant)
    known = {"strategy", "step", "threshold", "origin", "bound", "weights", "noisy_counts"}
    assert set(after.get(key, ())) <= known
    for old, new in zip(
        tensors_in(before.get(key, {})), tensors_in(after.get(key, {})), strict=True
    ):
        assert torch.equal(old, new)
    file = io.BytesIO()
    torch.save(after, file)
    file.seek(0)
    torch.load(file, weights_only=True)  # plain numbers and tensors only
    for copied in (copy.deepcopy(noise), pickle.loads(pickle.dumps(noise))):
        assert copied.generator is None


def test_checkpoints_of_other_strategies() -> None:
    adaptive, flat = start(clipping.adaptive()), start("flat")
    train(adaptive, [rows(4)])
    threshold = adaptive[3].max_grad_norm
    with pytest.warns(UserWarning, match="no state of a clipping strategy"):
        adaptive[3].load_state_dict(flat[3].state_dict())  # missing keys load
    assert adaptive[3].max_grad_norm == threshold
    with pytest.warns(UserWarning, match="another strategy's state"):
        flat[3].load_state_dict(adaptive[3].state_dict())
    groups = start(clipping.dpsgd_f(3))
    with pytest.raises(ArgumentError, match="strategy that it was saved from"):
        groups[3].load_state_dict(adaptive[3].state_dict())
    broken = adaptive[3].state_dict()
    broken["fastclip_clipping"]["threshold"] = torch.tensor(math.nan)
    with pytest.raises(ArgumentError, match="thresholds are outside the range from"):
        adaptive[3].load_state_dict(broken)
    assert adaptive[3].max_grad_norm == threshold


# Opacus' surface


def test_opacus_adaptive_keywords() -> None:
    """Same total sigma, so the same epsilon; the count takes its share of it."""
    _, _, private, optimizer = start(
        "adaptive", target_unclipped_quantile=0.6, clipbound_learning_rate=0.3, min_clipbound=0.1,
        max_clipbound=5.0, unclipped_num_std=4.0,
    )  # fmt: skip
    total, gradients, counts = optimizer.noise_levels
    assert total == SIGMA
    assert counts == pytest.approx(8.0, rel=1e-12)  # of a count of +1/2 and -1/2
    assert gradients == pytest.approx((SIGMA**-2 - 8.0**-2) ** -0.5, rel=1e-12)
    backward(private, rows(4))
    optimizer.step()
    policy = optimizer.grad_state.clipping.strategy.threshold
    assert (policy.target, policy.learning_rate, policy.lower, policy.upper) == (0.6, 0.3, 0.1, 5.0)


def test_opacus_schedulers_move_any_strategy() -> None:
    """They multiply max_grad_norm and noise_multiplier, whatever those drive."""
    _, _, _, optimizer = start(clipping.adaptive())
    assert isinstance(optimizer, DPOptimizer)
    grad_clip = ExponentialGradClip(optimizer, gamma=0.5)
    noise = ExponentialNoise(optimizer, gamma=0.5)
    grad_clip.step()
    noise.step()
    assert optimizer.max_grad_norm == 0.5
    assert optimizer.noise_multiplier == SIGMA / 2
    _, _, _, groups = start(clipping.dpsgd_f(2, thresholds="previous_step"))
    groups.max_grad_norm = 3.0
    assert groups.grad_state.clipping.next.threshold.tolist() == [6.0, 6.0]
    _, _, _, cutoff = start(clipping.global_adapt(2.0))
    cutoff.max_grad_norm = 3.0
    assert cutoff.threshold.item() == 2.0
    assert (
        cutoff.grad_state.clipping.strategy.sensitivity(cutoff.grad_state.clipping.next).item()
        == 3.0
    )


def test_noise_changed_between_the_counts_and_the_step() -> None:
    """Counts of a same-step policy are spent in backward: the gradient gets what is left."""
    engine, _, private, optimizer = start(clipping.dpsgd_f(3))
    engine.set_groups(groups_of(rows(4)))
    backward(private, rows(4))
    spent = optimizer.noise_levels.counts
    optimizer.noise_multiplier = 2.0
    assert optimizer.grad_state.clipping.gradient_noise() == pytest.approx(
        (2.0**-2 - spent**-2) ** -0.5, rel=1e-12
    )
    optimizer.noise_multiplier = spent
    with pytest.raises(StepError, match="noise"):
        optimizer.step()


def test_epsilon_of_a_schedule_is_composed() -> None:
    """The accountant records the multiplier of every step."""
    strategy = clipping.sad_dpsgd(STEPS, stages=3, noise_decay=0.5, length_decay=0.5)
    run = start(strategy)
    train(run, [rows(4)] * STEPS)
    history = run[0].accountant.history
    assert [(sigma, n) for sigma, _, n in history] == [
        (pytest.approx(SIGMA * 2**j), n) for j, n in enumerate([2, 3, 7])
    ]
    assert run[3].noise_multiplier == SIGMA * 4  # a longer run stays in the last stage
    assert run[3].threshold.item() == pytest.approx(0.8**2)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", ["adaptive", "sad_dpsgd", "auto_l", "dpsgd_f"])
@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_budget_is_met_by_any_strategy(name: str, accountant: str) -> None:
    """make_private_with_epsilon, then the whole run recorded: epsilon is the target's."""
    engine = FastPrivacyEngine(accountant=accountant)
    model = mlp()
    _, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.zeros(60, 1)), batch_size=10),
        target_epsilon=4.0, target_delta=1e-3, epochs=2, max_grad_norm=1.0,
        clipping=PRESETS[name],
    )  # fmt: skip
    state = optimizer.grad_state.clipping
    for _ in range(2 * len(loader)):
        optimizer.step_hook(optimizer)
        state.advance()
    assert 3.98 <= engine.get_epsilon(1e-3) <= 4.0


class Doubled:
    """A schedule of a user's own that does not start at 1."""

    def factor(self, step: int) -> float:
        return 2.0 if step < 4 else 3.0

    def runs(self, steps: int) -> list[tuple[float, int]]:
        return [(2.0, min(steps, 4)), (3.0, steps - 4)] if steps > 4 else [(2.0, steps)]


def test_budget_is_met_by_a_schedule_that_does_not_start_at_one() -> None:
    """sigma_t = sigma_1 * factor(t) from the first step on, as it was calibrated."""
    engine = FastPrivacyEngine(accountant="rdp")
    model = mlp()
    private, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(rows(60)), batch_size=10),
        target_epsilon=4.0, target_delta=1e-3, epochs=2, max_grad_norm=1.0,
        clipping=Clipping(noise=Doubled()),
    )  # fmt: skip
    for _ in range(2):
        for (x,) in loader:
            optimizer.zero_grad()
            backward(private, x)
            optimizer.step()
    assert 3.98 <= engine.get_epsilon(1e-3) <= 4.0


# Refused


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Clipping(Global(1.0), PerLayer()), "per layer"),
        (lambda: Clipping(Automatic(normalized=True), Quantile()), "do not depend"),
        (lambda: Clipping(noise=clipping.StagedNoise(10), threshold=clipping.StagedThreshold(20)),
         r"\[10, 20\]"),
        (lambda: Clipping(Constant(), clipping.Hard()), "threshold policy"),
        (lambda: Clipping("hard", Constant()), "first part"),
        (lambda: Clipping(noise=0.5), "third part"),
        (lambda: Quantile("below", tau=2.0), "count_as='above'"),
        (lambda: Quantile("sideways"), "'below' or 'above'"),
        (lambda: Quantile(lower=2.0, upper=1.0), "at most upper"),
        (lambda: Quantile(centred=True, num_groups=2), "one-hot"),
        (lambda: clipping.adaptive(target_quantile=1.5), "target_quantile"),
        (lambda: clipping.adaptive(count_noise_ratio=0), "count_noise_ratio"),
        (lambda: clipping.bounded_adaptive(lower=-1.0), "lower"),
        (lambda: clipping.dpsgd_f(0), "num_groups"),
        (lambda: clipping.dpsgd_f(2, thresholds="next_step"), "same_step"),
        (lambda: clipping.naive_reweighting(2, max_weight=0.0), "max_weight"),
        (lambda: clipping.sad_dpsgd(2, stages=3), "total_steps"),
        (lambda: clipping.sad_dpsgd(100, noise_decay=1.2), "noise_decay"),
        (lambda: clipping.automatic(gamma=5e-13), r"\(5e-13, inf\) or 0"),
        (lambda: clipping.automatic(gamma=5e-324), "gamma"),
        (lambda: clipping.automatic(gamma=-1e-9), "gamma"),
        (lambda: clipping.automatic(gamma=math.nan), "gamma"),
        (lambda: clipping.automatic(gamma=False), "gamma"),
        (lambda: clipping.fixed_soft(eps=math.inf), "eps"),
        (lambda: clipping.global_adapt(z=0.0), "z expects"),
    ],
)  # fmt: skip
def test_refused_at_construction(build, message: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        build()


def test_refused_by_make_private() -> None:
    with pytest.raises(ArgumentError, match="unclipped_num_std expects more than"):
        start("adaptive", unclipped_num_std=0.3)
    with pytest.raises(ArgumentTypeError, match="target_unclipped_quantile"):
        start("flat", target_unclipped_quantile=0.5)
    with pytest.raises(ArgumentError, match="Omit grad_sample_mode"):
        start(clipping.adaptive(), grad_sample_mode="hooks")
    model = nn.Linear(2, 1)
    with pytest.raises(ArgumentError, match="'gdp' composes constant noise only"):
        FastPrivacyEngine(accountant="gdp").make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=4),
            noise_multiplier=1.0, max_grad_norm=1.0, clipping=clipping.sad_dpsgd(10),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: clipping.StagedNoise(10, 3, length_decay=1e-300), "without any step"),
        (lambda: clipping.StagedNoise(10, 3, length_decay=0.05), "without any step"),
        (lambda: clipping.StagedNoise(10, 3, decay=1e-200), "Choose a slower change"),
        (lambda: clipping.ExponentialNoise(10, 3, rate=800.0), "Choose a slower change"),
        (lambda: clipping.StagedThreshold(10, 3, length_decay=1e-300), "without any step"),
    ],
)
def test_refused_schedules(build, message: str) -> None:
    """No stage is empty, and the noise neither vanishes nor explodes."""
    with pytest.raises(ArgumentError, match=message):
        build()

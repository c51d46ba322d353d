"""The mode of a traced step: when it is entered, that it leaves, and that it takes nobody else away."""

from __future__ import annotations

import copy
import gc
import io
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip._torch import place_beneath, take_away
from fastclip.errors import GraphError, ParameterLeakError
from tests.oracle import Batch, assert_sums, clipped_sum, per_sample_gradients, summed

ROWS, BATCH, D, CLASSES, C = 40, 8, 4, 3, 0.5
PROVEN = {"proven", "values", "path"}


class Stop(Exception):
    """What a user's code raises."""


class Counting(TorchDispatchMode):
    """A user's own mode."""

    def __init__(self) -> None:
        super().__init__()
        self.heard = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.heard += 1
        return func(*args, **(kwargs or {}))


def modes() -> int:
    return torch._C._len_torch_dispatch_stack()


@pytest.fixture(autouse=True)
def _no_mode_is_left() -> Iterator[None]:
    while modes():  # of a test that has failed
        torch._C._pop_torch_dispatch_stack(None)
    yield
    if modes():  # of a run that a cycle keeps
        gc.collect()
    assert modes() == 0


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()


def rows(n: int = ROWS) -> TensorDataset:
    g = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randn(n, D, generator=g).double(), torch.arange(n) % CLASSES)


class Run:
    """A private network with its loader; nothing is added to the sums but what was clipped."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        self.plain = model or network()
        self.engine = FastPrivacyEngine(accountant="rdp")
        loader = options.pop("loader", None) or DataLoader(rows(), batch_size=BATCH)
        options = {"noise_multiplier": 0.0, "poisson_sampling": False, **options}
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=self.plain, optimizer=torch.optim.SGD(self.plain.parameters(), lr=0.1),
            data_loader=loader, max_grad_norm=C, **options,
        )  # fmt: skip

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.model(x), y)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        self.loss(x, y).backward()
        self.optimizer.step()

    def check_sums(self, x: Tensor, y: Tensor) -> None:
        """What the last pass has summed is what these samples give one at a time."""
        assert_sums(self.sums, clipped(self.plain, x, y), 1e-10)

    def check_traced(self, steps: int = 2, verdict: str = "proven") -> None:
        proof = self.engine.explain()
        assert [report.verdict for report in proof.steps] == [verdict] * steps, str(proof)
        assert all(report.uses for report in proof.steps)
        assert proof.unproven == ()

    @property
    def sums(self) -> dict[str, Tensor]:
        return summed(dict(self.plain.named_parameters()))

    @property
    def held(self) -> list[Any]:
        return [getattr(p, "summed_grad", None) for p in self.plain.parameters()]


def clipped(plain: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """One sample at a time, of the weights as they are."""
    twin = network()
    twin.load_state_dict({k: v.detach() for k, v in plain.state_dict().items()})
    own = {"loss_fn": lambda out, y: F.cross_entropy(out, y, reduction="none")}
    return clipped_sum(per_sample_gradients(twin, Batch((x,), target=y), **own), C)


def dice(out: Tensor, y: Tensor) -> Tensor:
    """Of the batch, not of each sample."""
    p, t = out.softmax(-1), F.one_hot(y, out.shape[-1]).to(out)
    return 1 - (2 * (p * t).sum() / (p.sum() + t.sum()))


# The loop


def test_two_steps_are_traced_and_exact() -> None:
    run, inside = Run(), []
    for x, y in run.loader:
        run.optimizer.zero_grad()
        inside.append(modes())
        run.loss(x, y).backward()
        run.check_sums(x, y)
        run.optimizer.step()
        assert modes() == 0
    assert inside == [1, 1, 0, 0, 0]
    run.check_traced()


def test_a_batch_from_elsewhere_is_traced_from_the_models_call_on() -> None:
    run = Run()
    x, y = rows().tensors
    for k in (0, 8, 16):
        assert modes() == 0
        run.step(x[k : k + 8 - k // 8], y[k : k + 8 - k // 8])
        assert modes() == 0
    run.check_traced()


def test_a_loop_that_is_left_leaves_no_mode() -> None:
    run = Run()
    for _ in run.loader:
        assert modes() == 1
        break
    assert modes() == 0
    for x, y in run.loader:
        run.step(x, y)
    run.check_traced()


def _in_the_body(run: Run, x: Tensor, y: Tensor) -> None:
    raise Stop


def _after_the_forward(run: Run, x: Tensor, y: Tensor) -> None:
    run.loss(x, y)
    raise Stop


def _in_the_forward(run: Run, x: Tensor, y: Tensor) -> None:
    handle = run.plain[1].register_forward_hook(_stop)
    try:
        run.loss(x, y)
    finally:
        handle.remove()


def _interrupted(run: Run, x: Tensor, y: Tensor) -> None:
    handle = run.plain[1].register_forward_hook(_interrupt)
    try:
        run.loss(x, y)
    finally:
        handle.remove()


def _in_the_backward(run: Run, x: Tensor, y: Tensor) -> None:
    out = run.model(x)
    out.register_hook(_stop)
    F.cross_entropy(out, y).backward()


def _deep_in_the_backward(run: Run, x: Tensor, y: Tensor) -> None:
    kept = []
    handle = run.plain[0].register_forward_hook(lambda m, a, out: kept.append(out))
    loss = run.loss(x, y)
    handle.remove()
    kept[-1].register_hook(_stop)
    loss.backward()


def _stop(*_: Any) -> None:
    raise Stop


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


FAULTS: list[Callable[[Run, Tensor, Tensor], None]] = [
    _in_the_body, _after_the_forward, _in_the_forward, _interrupted, _in_the_backward,
    _deep_in_the_backward,
]  # fmt: skip


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__[1:])
def test_an_error_leaves_no_mode_and_loses_nothing(fault: Callable) -> None:
    """The same batch, given again, trains; nothing was summed, released or accounted."""
    run, caught = Run(), None
    try:
        for batch in run.loader:
            fault(run, *batch)
    except (Stop, KeyboardInterrupt) as error:
        caught = error  # with its traceback, whose frames are kept
    assert caught is not None
    assert modes() == 0
    assert run.held == [None] * 4
    assert run.engine.accountant.history == []
    run.optimizer.zero_grad()
    run.loss(*batch).backward()
    run.check_sums(*batch)
    run.optimizer.step()
    assert sum(steps for _, _, steps in run.engine.accountant.history) == 1
    assert modes() == 0
    run.check_traced(1)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__[1:])
def test_an_error_that_the_loop_forgives(fault: Callable) -> None:
    """The loop goes on, with the same batch or the next one."""
    run = Run()
    for k, (x, y) in enumerate(run.loader):
        if k in (0, 2):
            with suppress(Stop, KeyboardInterrupt):
                fault(run, x, y)
        if k != 2:
            run.step(x, y)
            assert modes() == 0
    run.check_traced()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", FAULTS[2:], ids=lambda f: f.__name__[1:])
def test_an_error_on_a_batch_from_elsewhere(fault: Callable) -> None:
    run = Run()
    x, y = rows().tensors
    with suppress(Stop, KeyboardInterrupt):
        fault(run, x[:8], y[:8])
    run.optimizer.zero_grad()
    assert modes() == 0
    run.loss(x[:8], y[:8]).backward()
    run.check_sums(x[:8], y[:8])
    run.optimizer.step()
    run.check_traced(1)


def test_a_coupled_loss_is_refused_and_the_batch_given_again_trains() -> None:
    run = Run()
    for k, (x, y) in enumerate(run.loader):
        run.optimizer.zero_grad()
        if k < 2:
            with pytest.raises(GraphError, match="mixes samples"):
                dice(run.model(x), y).backward()
            assert run.held == [None] * 4
            assert sum(steps for *_, steps in run.engine.accountant.history) == k
        run.step(x, y)
    assert modes() == 0
    assert [r.verdict for r in run.engine.explain().steps] == ["coupled", "proven"]


def test_a_generator_around_the_loader() -> None:
    run = Run()

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        yield from run.loader

    taken = batches()
    next(taken)
    assert modes() == 1
    taken.close()
    assert modes() == 0
    taken = batches()
    run.step(*next(taken))
    next(taken)
    del taken
    assert modes() == 0


def test_workers_that_persist() -> None:
    """Their iterator outlives the loop: the next batch, or the end of the run, ends what was begun."""
    loader = DataLoader(
        rows(), batch_size=BATCH, num_workers=1, persistent_workers=True,
        multiprocessing_context="fork",
    )  # fmt: skip
    run = Run(loader=loader)
    for _ in run.loader:
        break
    for x, y in run.loader:
        run.step(x, y)
        assert modes() == 0
    run.check_traced()


def test_an_iterator_that_is_kept() -> None:
    run = Run()
    kept = iter(run.loader)
    next(kept)
    x, y = next(kept)
    run.step(x, y)
    assert modes() == 0
    next(kept)
    assert modes() == 1
    del kept
    assert modes() == 0


def test_a_run_that_is_dropped_in_the_middle_of_a_step() -> None:
    run = Run()
    kept = iter(run.loader)
    x, _ = next(kept)
    out = run.model(x)
    assert modes() == 1
    del run, out
    gc.collect()
    assert modes() == 0


# Other modes


def test_a_mode_around_the_loop_stays() -> None:
    run = Run()
    with Counting() as mine:
        for x, y in run.loader:
            run.step(x, y)
            assert torch._C._get_dispatch_stack_at(modes() - 1) is mine
            assert modes() == 1
        before = mine.heard
        torch.ones(2) + 1
        assert mine.heard > before
    run.check_traced()


def test_a_mode_within_the_body() -> None:
    run, mine = Run(), Counting()
    for x, y in run.loader:
        with mine:
            before = mine.heard
            run.step(x, y)
            assert mine.heard > before
            assert modes() == 1
        assert modes() == 0
    run.check_traced()


@pytest.mark.parametrize("closes", ["before the step", "before the loss", "before the next batch"])
def test_a_mode_that_is_closed_while_the_step_runs(closes: str) -> None:
    """Opened before the batch or the model's call; each takes away its own."""
    run, mine = Run(), Counting()
    batches = iter(run.loader)
    for _ in range(3):
        mine.__enter__()
        x, y = next(batches)
        out = run.model(x)
        if closes == "before the loss":
            mine.__exit__(None, None, None)
            assert all(
                m is not mine
                for m in torch.utils._python_dispatch._get_current_dispatch_mode_stack()
            )
        F.cross_entropy(out, y).backward()
        run.check_sums(x, y)
        if closes == "before the step":
            mine.__exit__(None, None, None)
        run.optimizer.step()
        if closes == "before the next batch":
            assert modes() == 1
            mine.__exit__(None, None, None)
        run.optimizer.zero_grad()
        assert modes() == 0
    run.check_traced()


def test_what_torch_keeps_of_modes_is_as_before() -> None:
    """Whether any mode is open decides what is compiled."""
    run, mine = Run(), Counting()
    flags = lambda: {  # noqa: E731
        name: value for name, value in vars(torch.utils._python_dispatch).items()
        if name.startswith("_is_in_")
    }  # fmt: skip
    before = flags()
    mine.__enter__()
    x, y = next(iter(run.loader))
    out = run.model(x)
    mine.__exit__(None, None, None)
    F.cross_entropy(out, y).backward()
    mine.__enter__()
    run.optimizer.step()
    mine.__exit__(None, None, None)
    assert modes() == 0
    assert flags() == before


def test_modes_of_torchs_own_are_left_alone() -> None:
    """Under invented tensors nothing is traced."""
    mine = Counting()
    with FakeTensorMode() as fake:
        assert not place_beneath(mine)
        assert modes() == 1
        assert torch._C._get_dispatch_stack_at(0) is fake
    assert not take_away(mine)
    assert place_beneath(mine)
    assert take_away(mine)


# What lies between


def _evaluated(run: Run) -> None:
    run.model.eval()
    with torch.no_grad():
        for x, y in DataLoader(rows(), batch_size=5):
            (run.model(x).argmax(-1) == y).double().mean().item()
    run.model.train()


def _in_inference_mode(run: Run) -> None:
    with torch.inference_mode():
        for x, y in DataLoader(rows(), batch_size=5):
            (run.model(x).argmax(-1) == y).double().mean().item()


def _by_its_own_loader(run: Run) -> None:
    with torch.no_grad():
        run.model(next(iter(run.loader))[0])


def _a_plain_model(run: Run) -> None:
    other = network()
    x, y = rows().tensors
    F.cross_entropy(other(x), y).backward()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "between",
    [_evaluated, _in_inference_mode, _by_its_own_loader, _a_plain_model],
    ids=lambda f: f.__name__[1:],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_evaluation_in_the_middle_of_a_step(between: Callable, when: str) -> None:
    """Between the batch and the model, and between the model and the backward pass."""
    run = Run()
    for x, y in run.loader:
        run.optimizer.zero_grad()
        if when == "before":
            between(run)
        loss = run.loss(x, y)
        if when == "after":
            between(run)
        loss.backward()
        run.check_sums(x, y)
        run.optimizer.step()
        assert modes() == 0
    proof = run.engine.explain()
    assert [report.verdict for report in proof.steps] == ["proven"] * 2, str(proof)


def test_a_step_in_another_thread() -> None:
    """The batch is handed out here, the model trains there."""
    run, errors = Run(), []

    def train(x: Tensor, y: Tensor) -> None:
        try:
            run.optimizer.zero_grad()
            run.loss(x, y).backward()
            run.check_sums(x, y)
            run.optimizer.step()
            assert modes() == 0
        except BaseException as error:
            errors.append(error)

    for x, y in run.loader:
        thread = threading.Thread(target=train, args=(x, y))
        thread.start()
        thread.join()
    assert errors == []
    assert modes() == 0
    run.check_traced()


def test_a_coupled_loss_in_another_thread() -> None:
    run, errors = Run(), []

    def train(x: Tensor, y: Tensor) -> None:
        try:
            dice(run.model(x), y).backward()
        except GraphError as error:
            errors.append(str(error))

    x, y = next(iter(run.loader))
    thread = threading.Thread(target=train, args=(x, y))
    thread.start()
    thread.join()
    assert "mixes samples" in errors[0]


def test_batches_that_another_thread_draws_ahead() -> None:
    run, drawn = Run(), []
    turn, taken = threading.Semaphore(2), threading.Semaphore(0)

    def draw() -> None:
        for batch in run.loader:
            turn.acquire()
            drawn.append(batch)
            taken.release()

    thread = threading.Thread(target=draw)
    thread.start()
    for _ in range(ROWS // BATCH):
        taken.acquire()
        x, y = drawn.pop(0)
        loss = run.loss(x, y)
        turn.release()
        loss.backward()
        run.check_sums(x, y)
        run.optimizer.step()
        run.optimizer.zero_grad()
        assert modes() == 0
    thread.join()
    run.check_traced()


# Several models


def test_two_engines_in_turns() -> None:
    one, two = Run(), Run()
    for (x, y), (u, v) in zip(one.loader, two.loader, strict=True):
        one.step(x, y)
        two.step(u, v)
    assert modes() == 0
    one.check_traced()
    two.check_traced()


def test_two_engines_on_one_batch() -> None:
    """The other's parameters are trained by a step of its own."""
    one, two, checks = Run(), Run(), []
    for x, y in one.loader:
        one.optimizer.zero_grad()
        two.optimizer.zero_grad()
        first, second = one.loss(x, y), two.loss(x, y)
        first.backward()
        second.backward()
        checks.append((x, y, *((copy.deepcopy(r.plain.state_dict()), r.sums) for r in (one, two))))
        one.optimizer.step()
        two.optimizer.step()
        assert modes() == 0
    for x, y, *runs in checks:  # the steps of both are over
        for weights, sums in runs:
            twin = network()
            twin.load_state_dict(weights)
            assert_sums(sums, clipped(twin, x, y), 1e-10)
    one.check_traced()
    two.check_traced()


class Generator(nn.Module):
    """Of rows of a class."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.table = nn.Linear(2, D).double(), nn.Embedding(CLASSES, 2).double()

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.net(z + self.table(y))


@pytest.mark.parametrize("classes", ["drawn", "of the batch"])
def test_a_private_discriminator(classes: str) -> None:
    run, generator = (
        Run(nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 1)).double()),
        Generator(),
    )
    inner = torch.optim.SGD(generator.parameters(), lr=0.1)
    for x, y in run.loader:
        one = torch.ones(BATCH, 1).double()
        run.optimizer.zero_grad()
        y = y if classes == "of the batch" else torch.randint(CLASSES, (BATCH,))
        fake = generator(torch.randn(BATCH, 2).double(), y)
        score = F.binary_cross_entropy_with_logits
        loss = score(run.model(x), one) + score(run.model(fake.detach()), 0 * one)
        loss.backward()
        run.optimizer.step()
        inner.zero_grad()
        with run.engine.paused():
            out = run.model(generator(torch.randn(BATCH, 2).double(), y))
            (
                score(out, one) * out.std()
            ).backward()  # it may mix samples, which trains none of the model
        assert all(p.grad is not None for p in generator.parameters())
        inner.step()
        assert modes() == 0
    assert [r.verdict for r in run.engine.explain().steps] == ["proven"] * 2


def test_a_generator_that_is_trained_on_the_private_models_batch() -> None:
    """Not paused: what is trained outside is refused, as before."""
    run, generator = (
        Run(nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 1)).double()),
        Generator(),
    )
    for _, y in run.loader:
        out = run.model(generator(torch.randn(BATCH, 2).double(), y))
        with pytest.raises(ParameterLeakError):
            out.mean().backward()
        assert run.held == [None] * 4
        break


# Copies


def test_copies_in_the_middle_of_a_step() -> None:
    run = Run()
    for x, y in run.loader:
        twin = copy.deepcopy(run.model)
        held = io.BytesIO()
        torch.save({"model": run.plain.state_dict(), "batch": (x, y)}, held)
        torch.save(run.engine.accountant.state_dict(), held)
        run.step(x, y)
        assert modes() == 0
        twin(x)
        assert modes() == 0
    run.check_traced()


# Other ways of a step


@pytest.mark.slow
def test_a_compiled_model() -> None:
    run = Run()
    compiled = torch.compile(run.model, backend="eager")
    for x, y in run.loader:
        run.optimizer.zero_grad()
        F.cross_entropy(compiled(x), y).backward()
        run.check_sums(x, y)
        run.optimizer.step()
        assert modes() == 0
    run.check_traced()


@pytest.mark.slow
def test_a_coupled_loss_of_a_compiled_model() -> None:
    run = Run()
    compiled = torch.compile(run.model, backend="eager")
    batches = iter(run.loader)
    x, y = next(batches)
    with pytest.raises(GraphError, match="mixes samples"):
        dice(compiled(x), y).backward()


@pytest.mark.slow
def test_a_coupled_loss_of_a_compiled_model_on_a_batch_from_nowhere() -> None:
    """Where the first step begins inside the compiled call, the second one is the first traced."""
    run = Run()
    compiled = torch.compile(run.model, backend="eager")
    x, y = rows(BATCH)[:]
    F.cross_entropy(compiled(x), y).backward()
    run.optimizer.step()
    run.optimizer.zero_grad()
    with pytest.raises(GraphError, match="mixes samples"):
        dice(compiled(x), y).backward()


def test_the_model_twice_under_one_loss() -> None:
    run = Run()
    for x, y in run.loader:
        run.optimizer.zero_grad()
        a, b = run.model(x), run.model(x.flip(-1))
        (F.cross_entropy(a, y) + F.mse_loss(a, b)).backward()
        twin = network()
        twin.load_state_dict(run.plain.state_dict())
        run.optimizer.step()
        assert modes() == 0
    run.check_traced()


def test_a_frozen_teacher_as_wide_as_the_batch() -> None:
    """Its weights have an axis as long as the batch, and hold no samples."""
    teacher = nn.Sequential(nn.Linear(D, BATCH), nn.Tanh(), nn.Linear(BATCH, CLASSES)).double()
    teacher.requires_grad_(False)
    run = Run()
    for x, _ in run.loader:
        run.optimizer.zero_grad()
        (run.model(x) - teacher(x)).square().sum(1).mean().backward()
        run.optimizer.step()
    run.check_traced()


def test_twice_under_a_loss_that_compares_with_others() -> None:
    run = Run()
    x, _ = next(iter(run.loader))
    a, b = run.model(x), run.model(x.flip(-1))
    with pytest.raises(GraphError, match="mixes samples"):
        F.cross_entropy(a @ b.t(), torch.arange(len(x))).backward()


def test_accumulation_by_two_passes() -> None:
    run, kept = Run(), []
    for x, y in run.loader:
        kept.append((x, y))
        run.loss(x, y).backward()
        if len(kept) == 2:
            x, y = (torch.cat(parts) for parts in zip(*kept, strict=True))
            run.check_sums(x, y)
            run.optimizer.step()
            run.optimizer.zero_grad()
            kept = []
            assert modes() == 0
    run.check_traced()


def test_physical_batches() -> None:
    run = Run(poisson_sampling=True, sample_rate=0.4, expected_batch_size=16)
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
    ) as batches:
        for x, y in batches:
            run.step(x, y)
            assert modes() == 0
    run.check_traced()


def test_a_coupled_loss_of_physical_batches() -> None:
    run = Run(poisson_sampling=True, sample_rate=0.4, expected_batch_size=16)
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
    ) as batches:
        x, y = next(iter(batches))
        with pytest.raises(GraphError, match="mixes samples"):
            dice(run.model(x), y).backward()


def test_a_made_step() -> None:
    run = Run()
    step = run.engine.make_step(
        run.model, lambda model, x, y: F.cross_entropy(model(x), y, reduction="none"),
        physical_batch=BATCH,
    )  # fmt: skip
    for x, y in run.loader:
        run.optimizer.zero_grad()
        step(x, y)
        run.check_sums(x, y)
        run.optimizer.step()
        assert modes() == 0
    run.check_traced()


def test_a_made_step_with_a_coupled_loss() -> None:
    run = Run()
    step = run.engine.make_step(
        run.model,
        lambda model, x, y: F.cross_entropy(model(x), y, reduction="none") * dice(model(x), y),
        physical_batch=BATCH,
    )
    x, y = next(iter(run.loader))
    with pytest.raises(GraphError, match="mixes samples"):
        step(x, y)
    assert run.held == [None] * 4


# A batch in parts


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _computed(x: Tensor) -> Tensor:
    return 2 * x


@pytest.mark.one_in(2)
@pytest.mark.parametrize("made", [_as_it_is, _computed])
@pytest.mark.parametrize("size", [4, 3])
def test_a_batch_that_the_loop_splits(made: Callable, size: int) -> None:
    """Each part has a pass of its own."""
    run = Run()
    for x, y in run.loader:
        run.optimizer.zero_grad()
        x = made(x)
        for part, labels in zip(x.split(size), y.split(size), strict=True):
            run.loss(part, labels).backward()
        run.check_sums(x, y)
        run.optimizer.step()
        assert modes() == 0
    run.check_traced()


@pytest.mark.parametrize("made", [_as_it_is, _computed])
def test_a_part_that_meets_the_whole_batch(made: Callable) -> None:
    run = Run()
    for x, y in run.loader:
        h = made(x)
        part, labels = h.split(4)[1], y.split(4)[1]
        with pytest.raises(GraphError, match=r"mixes samples|whole batch"):
            (F.cross_entropy(run.model(part), labels) * h.mean().exp()).backward()
        break


@pytest.mark.parametrize("handed", [True, False])
def test_two_parts_in_one_pass(handed: bool) -> None:
    """Their rows would be clipped together."""
    run, kept = Run(), []
    for x, y in run.loader if handed else [rows()[:8]]:
        with pytest.raises(GraphError, match=r"calls of the model|position in the batch"):
            (run.loss(x[:4], y[:4]) + run.loss(x[4:], y[4:])).backward()
        kept.append(run.held)
        break
    assert kept == [[None] * 4]

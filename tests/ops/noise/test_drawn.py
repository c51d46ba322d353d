"""Noise that two steps of one ledger share could be subtracted: it is refused; nothing else is."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.clipping import adaptive, dpsgd_f
from fastclip.errors import StepError
from fastclip.ops.noise import DrawnStates, SeededNoise
from tests.refusal import refused

ROWS, SEEN = 32, "errors.html#repeated-noise"
KINDS: list[dict[str, Any]] = [
    {}, {"clipping": adaptive()}, {"grad_sample_mode": "hooks"}, {"grad_sample_mode": "functorch"},
]  # fmt: skip


class Run:
    """A linear model, and its noise alone: its losses are 0."""

    def __init__(self, engine: FastPrivacyEngine, width: int = 5, **options: Any) -> None:
        self.engine, self.model = engine, nn.Linear(width, 2)
        self.private, self.optimizer, self.loader = engine.make_private(
            module=self.model, optimizer=torch.optim.SGD(self.model.parameters(), lr=1.0),
            data_loader=DataLoader(TensorDataset(torch.ones(ROWS, width)), batch_size=8),
            **{"noise_multiplier": 1.0, "max_grad_norm": 1.0, "rand_on_empty": True, **options},
        )  # fmt: skip

    def walk(self, steps: int) -> list[Tensor]:
        """Noise of the weights, by step."""
        found = []
        for (x,), _ in zip(self.loader, range(steps), strict=False):
            self.optimizer.zero_grad()
            (self.private(x) * 0).mean().backward()
            self.optimizer.step()
            assert self.model.weight.grad is not None
            found.append(self.model.weight.grad.clone())
        return found


def engine(**options: Any) -> FastPrivacyEngine:
    return FastPrivacyEngine(accountant="rdp", **options)


def alike(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_sweep_that_seeds_every_run_alike(options: dict[str, Any]) -> None:
    """Under one engine it is refused before anything moves; engines of their own repeat the noise."""
    one = engine()
    torch.manual_seed(42)
    first = Run(one, **options).walk(2)
    torch.manual_seed(42)
    second = Run(one, **{**options, "noise_multiplier": 2.0})
    before = [p.detach().clone() for p in second.model.parameters()]
    with refused(SEEN, StepError):
        second.walk(1)
    assert alike(before, [p.detach() for p in second.model.parameters()])
    assert all(p.grad is None for p in second.model.parameters())
    torch.manual_seed(42)
    assert alike(Run(engine(), **options).walk(2), first)
    torch.manual_seed(43)
    Run(one, **options).walk(2)


def test_runs_of_other_sizes_under_one_seed() -> None:
    """Their noise begins with the same words; so does that of a strategy which counts ahead."""
    one = engine()
    Run(one, noise_generator=torch.Generator().manual_seed(7)).walk(1)
    for options in ({"width": 7}, {"clipping": dpsgd_f(1), "poisson_sampling": False}):
        run = Run(one, noise_generator=torch.Generator().manual_seed(7), **options)
        if "clipping" in options:
            one.set_groups(torch.zeros(8, dtype=torch.int64), module=run.private)
        with refused(SEEN, StepError):
            run.walk(1)


@pytest.mark.parametrize("mode", ["fast", "hooks"])
@pytest.mark.parametrize("back", ["seed", "state"])
def test_a_generator_that_is_set_back_in_every_epoch(mode: str, back: str) -> None:
    generator = torch.Generator().manual_seed(7)
    start = generator.get_state()
    run = Run(engine(), noise_generator=generator, grad_sample_mode=mode)
    run.walk(3)
    run.walk(3)  # it goes on
    if back == "seed":
        generator.manual_seed(7)
    else:
        generator.set_state(start)
    with refused(SEEN, StepError):
        run.walk(1)
    generator.manual_seed(8)
    run.walk(3)


def test_one_generator_serves_two_models_of_one_engine() -> None:
    generator, one = torch.Generator().manual_seed(7), engine()
    runs = [Run(one, noise_generator=generator) for _ in range(2)]
    found = [noise for _ in range(2) for run in runs for noise in run.walk(2)]
    assert len({tuple(x.flatten().tolist()) for x in found}) == 8
    Run(one, noise_generator=generator).walk(1)


def test_a_source_that_follows_another_is_noted_too() -> None:
    run = Run(engine(), noise_generator=torch.Generator().manual_seed(7))
    run.walk(1)
    run.optimizer.noise_source = SeededNoise(torch.Generator().manual_seed(7))
    with refused(SEEN, StepError):
        run.walk(1)


def test_steps_without_noise_and_secure_ones_are_never_refused() -> None:
    for options in ({"noise_multiplier": 0.0}, {}):
        one = engine(secure_mode=not options)
        for _ in range(2):
            torch.manual_seed(3)
            Run(one, **options).walk(2)


def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(tmp_path) -> None:
    """In an engine of its own, whose ledger knows the steps up to there; the first one has seen more."""
    torch.manual_seed(4)
    run = Run(engine())
    run.walk(2)
    states = [s.get_state() for s in streams(run)]
    run.engine.save_checkpoint(path=tmp_path / "x", module=run.private, optimizer=run.optimizer)
    expected = run.walk(2)
    other = Run(engine())
    other.engine.load_checkpoint(
        path=tmp_path / "x", module=other.private, optimizer=other.optimizer
    )
    for stream, state in zip(streams(other), states, strict=True):
        stream.set_state(state)
    assert alike(other.walk(2), expected)
    assert sum(steps for *_, steps in other.engine.accountant.history) == 4
    run.engine.load_checkpoint(path=tmp_path / "x", module=run.private, optimizer=run.optimizer)
    streams(run)[0].set_state(states[0])
    with refused("errors.html#repeated-noise", StepError):
        run.walk(1)


def streams(run: Run) -> list[torch.Generator]:
    return [run.optimizer.noise_source.stream(), run.loader.batch_sampler.stream()]


def test_who_asks_for_a_stream_has_not_drawn() -> None:
    run = Run(engine())
    stream = run.optimizer.noise_source.stream()
    stream.get_state()
    run.walk(2)


def test_another_accountant_knows_what_the_first_one_did() -> None:
    from opacus.accountants import PRVAccountant

    generator = torch.Generator().manual_seed(7)
    run = Run(engine(), noise_generator=generator)
    run.walk(1)
    run.engine.accountant = PRVAccountant()
    generator.manual_seed(7)
    with refused(SEEN, StepError):
        run.walk(1)


def test_no_copy_holds_states() -> None:
    """Whoever has a digest could try seeds against it."""
    states, generator = DrawnStates(), torch.Generator().manual_seed(1)
    states.note(generator)
    with refused(SEEN, StepError):
        states.note(generator)
    copy.deepcopy(states).note(generator)
    ledger = engine().accountant
    ledger.drawn.note(generator)
    pickle.loads(pickle.dumps(ledger)).drawn.note(generator)
    run = Run(engine())
    run.walk(1)
    model = copy.deepcopy(run.private)
    assert model.grad_state.batch.account is None
    assert model.grad_state.clipping.noise.account is None


def test_a_seed_that_makes_the_same_words_is_the_same() -> None:
    drawn = DrawnStates()
    drawn.note(torch.Generator().manual_seed(7))
    drawn.note(torch.Generator().manual_seed(8))
    with refused(SEEN, StepError):
        drawn.note(torch.Generator().manual_seed(7 + 2**32))

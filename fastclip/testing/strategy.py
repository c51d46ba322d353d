"""`check_strategy`: checks the claims of a clipping strategy on a fine grid and in a run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from opacus.validators.errors import UnsupportedModuleError
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip.clipping import Clipping, resolve
from fastclip.clipping.contract import check_contract
from fastclip.clipping.strategy import in_words
from fastclip.engine.optimizer import STATE, FastDPOptimizer
from fastclip.engine.privacy_engine import FastPrivacyEngine
from fastclip.errors import FastclipError
from fastclip.testing.report import Check, own_randomness, quietly, table

_POINTS = 200_000
_STEPS = 3
_SAMPLES = 6


@dataclass(frozen=True)
class StrategyRow:
    """One property that was checked."""

    what: str
    wrong: str | None
    """What is wrong, in one sentence; None if nothing is."""


@dataclass(frozen=True)
class StrategyCheck(Check):
    """The result of `check_strategy`, made to be printed."""

    kind: str
    rows: tuple[StrategyRow, ...]

    def __str__(self) -> str:
        cells = [(row.what, "ok" if row.wrong is None else "wrong") for row in self.rows]
        return "\n".join(
            [f"strategy: {in_words(self.kind)}", *table(("what", ""), cells), *self._verdict()]
        )


def check_strategy(
    clipping: str | Clipping, *, max_grad_norm: float | Sequence[float] = 1.0, points: int = _POINTS
) -> StrategyCheck:
    """Compares a strategy with its claims, on a grid of norms and in a short private run.

    On the grid, s(n) n <= S must hold for norms 0, subnormal, tiny to huge, inf and NaN. The grid has
    `points` norms between 1e-6 and 1e6 thresholds, in every group or layer, at thresholds of many
    steps, in float32 and float64. A scale must depend on its own sample alone. One sample must change
    the counts by at most `count_sensitivity`. The noise schedule must be positive and as planned.
    `make_private` checks the same on fewer points.

    In the run, thresholds must not move in a backward pass or in a skipped step (a physical batch), but
    in real steps only. A state that was saved and loaded must continue as if the run had not been
    interrupted.

    Args:
        clipping: as for make_private.
        max_grad_norm: as for make_private. For a per-layer strategy, a number is used for all layers,
            and the length of a list is the number of layers.
        points: number of norms in a grid of twelve decades.

    Returns:
        A StrategyCheck, with `ok`, `rows` and `findings`.

    Raises:
        ArgumentError, ArgumentTypeError: clipping is not a strategy.
    """
    strategy = resolve(clipping)
    number = max_grad_norm if isinstance(max_grad_norm, (int, float)) else None
    layers = 3 if number is not None else len(max_grad_norm)  # type: ignore[arg-type]
    if number is not None and strategy.threshold.per_layer:
        max_grad_norm = [number] * layers
    start = strategy.initial(max_grad_norm, layers)
    rows = [
        _row(
            "contributions, counts and noise, on a grid",
            lambda: check_contract(copy.deepcopy(strategy), start, points),
        )
    ]
    if rows[0].wrong is None:  # otherwise make_private raises an error
        rows += [_row(what, check) for what, check in _runs(strategy, max_grad_norm, layers)]
    wrong = tuple(f"{row.what}: {row.wrong}" for row in rows if row.wrong is not None)
    return StrategyCheck(wrong, strategy.kind, tuple(rows))


def _row(what: str, check: Callable[[], Any]) -> StrategyRow:
    try:
        with own_randomness(0):
            found = check()
    except (FastclipError, UnsupportedModuleError) as error:
        return StrategyRow(what, str(error))
    except Exception as error:  # of the strategy's own code
        return StrategyRow(what, f"it fails with {type(error).__name__}: {error}")
    return StrategyRow(what, found)


def _runs(
    strategy: Clipping, max_grad_norm: float | Sequence[float], layers: int
) -> Iterator[tuple[str, Callable[[], str | None]]]:
    def start() -> _Run:
        # A copy, so attributes of a policy outside its state do not reach the other run.
        return _Run(copy.deepcopy(strategy), max_grad_norm, layers)

    yield "thresholds stay in a backward pass", lambda: start().stays(skip=False)
    if not strategy.threshold.same_step:  # those support no physical batches
        yield "thresholds stay in a skipped step", lambda: start().stays(skip=True)
    yield "state saves and loads", lambda: _resumes(start(), start())


class _Run:
    """A private run of a small model; two runs have the same samples and noise."""

    def __init__(
        self, strategy: Clipping, max_grad_norm: float | Sequence[float], layers: int
    ) -> None:
        generator = torch.Generator(device="cpu").manual_seed(0)
        self.x = torch.randn(
            _SAMPLES, layers, generator=generator, dtype=torch.float32, device="cpu"
        )
        self.groups = torch.arange(_SAMPLES, dtype=torch.int64, device="cpu")
        self.groups %= strategy.threshold.num_groups or 1
        self.noise = torch.Generator(device="cpu").manual_seed(0x5EED)  # unlikely in a script
        model = _Weights(layers)
        with quietly():
            self.engine = FastPrivacyEngine()
            self.model, optimizer, _ = self.engine.make_private(
                module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=DataLoader(TensorDataset(self.x), batch_size=_SAMPLES),
                noise_multiplier=1.0, max_grad_norm=max_grad_norm, poisson_sampling=False,
                clipping=strategy, noise_generator=self.noise,
            )  # fmt: skip
        self.optimizer: FastDPOptimizer = optimizer

    def backward(self) -> None:
        self.engine.set_groups(self.groups)
        self.model(self.x).square().mean().backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def thresholds(self) -> dict[str, Tensor]:
        """The thresholds of the next logical batch, as in a checkpoint, or the constant one."""
        saved = self.optimizer.state_dict().get(STATE) or {}
        held = {n: v for n, v in saved.items() if isinstance(v, Tensor) and n != "noisy_counts"}
        return held or {"threshold": self.optimizer.threshold.clone()}

    def stays(self, *, skip: bool) -> str | None:
        """A finding if a threshold moves without a real step."""
        for _ in range(_STEPS):
            before = self.thresholds()
            self.optimizer.zero_grad()
            if skip:
                self.optimizer.signal_skip_step(True)
            self.backward()
            if skip:
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.optimizer.signal_skip_step(False)
            moved = _differing(before, self.thresholds())
            if moved:
                return f"{moved} moves without a real step"
            if skip:
                self.backward()
            self.optimizer.step()
        return None


def _resumes(run: _Run, other: _Run) -> str | None:
    """A finding if a run with a checkpoint differs from one without."""
    for _ in range(_STEPS):
        run.step()
    other.model.load_state_dict(run.model.state_dict())
    other.optimizer.load_state_dict(run.optimizer.state_dict())
    other.noise.set_state(run.noise.get_state())
    moved = _differing(run.thresholds(), other.thresholds())
    if moved:
        return f"{moved} differs after loading from what was saved"
    if run.optimizer.noise_levels != other.optimizer.noise_levels:
        return (
            f"the noise of the next step is {run.optimizer.noise_levels}, but "
            f"{other.optimizer.noise_levels} after loading"
        )
    for _ in range(_STEPS):
        run.step()
        other.step()
        moved = _differing(run.thresholds(), other.thresholds())
        if moved:
            return (
                f"{moved} moves differently after loading a state than in the run that saved it: the "
                "policy has state outside its Thresholds"
            )
    return None


def _differing(before: dict[str, Tensor], after: dict[str, Tensor]) -> str | None:
    if before.keys() != after.keys():
        return " and ".join(sorted(before.keys() ^ after.keys()))
    return next(
        (name for name, value in before.items() if not torch.equal(value, after[name])), None
    )


class _Weights(nn.Module):
    """A model with the given number of parameter tensors."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Linear(layers, 2, bias=False, dtype=torch.float32, device="cpu")
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self.parts], -1).sum(-1)

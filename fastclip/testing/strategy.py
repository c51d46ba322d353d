"""check_strategy: does a clipping strategy keep what it claims, on a fine grid and in a run?"""

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
from fastclip.engine.optimizer import STATE, FastDPOptimizer
from fastclip.engine.privacy_engine import FastPrivacyEngine
from fastclip.errors import FastclipError
from fastclip.testing.report import Check, own_randomness, quietly, table

_POINTS = 200_000
_STEPS = 3
_ROWS = 6


@dataclass(frozen=True)
class StrategyRow:
    """One thing that was looked at."""

    what: str
    wrong: str | None
    """What is wrong with it, in one sentence."""


@dataclass(frozen=True)
class StrategyCheck(Check):
    """What `check_strategy` found; `print` it."""

    kind: str
    rows: tuple[StrategyRow, ...]

    def __str__(self) -> str:
        cells = [(row.what, "ok" if row.wrong is None else "wrong") for row in self.rows]
        return "\n".join([f"strategy {self.kind}", *table(("what", ""), cells), *self._verdict()])


def check_strategy(
    clipping: str | Clipping, *, max_grad_norm: float | Sequence[float] = 1.0, points: int = _POINTS
) -> StrategyCheck:
    """Compare a strategy with its claims, on norms and in a short private run.

    Contributions: s(n) n <= S for norms 0, subnormal, tiny to huge, inf and NaN, over `points` norms
    between 1e-6 and 1e6 thresholds, in every group or layer, at thresholds of many steps, in float32
    and float64; a scale depends on its own sample alone; one sample changes the counts by at most
    `count_sensitivity`; the noise schedule is positive and what it plans. `make_private` looks at the
    same, on fewer points.

    The run: thresholds stay where they are in a backward pass and in a step that is skipped (a
    physical batch), and move in real steps only; a state that was saved and loaded goes on as if the
    run had not been interrupted.

    Args:
        clipping: as for make_private.
        max_grad_norm: as for make_private; a number stands for all layers of a per-layer strategy,
            a list for as many layers as it has.
        points: how many norms in a scan of twelve decades.

    Returns:
        A StrategyCheck, with `ok`, `rows` and `findings`.

    Raises:
        ArgumentError, ArgumentTypeError: for what is no strategy.
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
    if rows[0].wrong is None:  # make_private would refuse it
        rows += [_row(what, look) for what, look in _runs(strategy, max_grad_norm, layers)]
    wrong = tuple(f"{row.what}: {row.wrong}" for row in rows if row.wrong is not None)
    return StrategyCheck(wrong, strategy.kind, tuple(rows))


def _row(what: str, look: Callable[[], Any]) -> StrategyRow:
    try:
        with own_randomness(0):
            found = look()
    except (FastclipError, UnsupportedModuleError) as error:
        return StrategyRow(what, str(error))
    except Exception as error:  # of the strategy's own code
        return StrategyRow(what, f"it fails with {type(error).__name__}: {error}")
    return StrategyRow(what, found)


def _runs(
    strategy: Clipping, max_grad_norm: float | Sequence[float], layers: int
) -> Iterator[tuple[str, Callable[[], str | None]]]:
    def start() -> _Run:
        # a copy: what a policy holds besides its state must not reach the other run
        return _Run(copy.deepcopy(strategy), max_grad_norm, layers)

    yield "thresholds stay in a backward pass", lambda: start().stays(skip=False)
    if not strategy.threshold.same_step:  # which takes no physical batches
        yield "thresholds stay in a skipped step", lambda: start().stays(skip=True)
    yield "state saves and loads", lambda: _resumes(start(), start())


class _Run:
    """A private run of a small model; two of them see the same rows and noise."""

    def __init__(
        self, strategy: Clipping, max_grad_norm: float | Sequence[float], layers: int
    ) -> None:
        draw = torch.Generator(device="cpu").manual_seed(0)
        self.x = torch.randn(_ROWS, layers, generator=draw, dtype=torch.float32, device="cpu")
        self.groups = torch.arange(_ROWS, dtype=torch.int64, device="cpu")
        self.groups %= strategy.threshold.num_groups or 1
        self.noise = torch.Generator(device="cpu").manual_seed(0x5EED)  # of no script
        model = _Weights(layers)
        with quietly():
            self.engine = FastPrivacyEngine()
            self.model, optimizer, _ = self.engine.make_private(
                module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                data_loader=DataLoader(TensorDataset(self.x), batch_size=_ROWS),
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
        """Those of the next logical batch, as a checkpoint holds them; none if they never change."""
        saved = self.optimizer.state_dict().get(STATE) or {}
        held = {n: v for n, v in saved.items() if isinstance(v, Tensor) and n != "noisy_counts"}
        return held or {"threshold": self.optimizer.threshold.clone()}

    def stays(self, *, skip: bool) -> str | None:
        """What moves without a real step."""
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
    """Whether a run goes on after a checkpoint as it does without one."""
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
    """A model of as many parameter tensors as asked for."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Linear(layers, 2, bias=False, dtype=torch.float32, device="cpu")
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in self.parts], -1).sum(-1)

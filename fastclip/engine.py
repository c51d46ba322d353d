"""FastPrivacyEngine: opacus.PrivacyEngine with exact clipping in one backward pass."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.distributed._composable.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

from fastclip import validation
from fastclip.accounting import find_noise_multiplier
from fastclip.bookkeeping import BookKeeper
from fastclip.clipping import Clipping, ConstantNoise, resolve
from fastclip.draws import Draws
from fastclip.errors import ArgumentError, ArgumentTypeError, StepError, UnsupportedLayerError
from fastclip.explanation import Explanation, Setup, explain
from fastclip.keystream import require_cipher
from fastclip.loader import watch_draws
from fastclip.materialised import MaterialisedDraws, optimizer_class
from fastclip.module import FastGradSampleHooks, FastGradSampleModule
from fastclip.optimizer import FastDPOptimizer
from fastclip.planner import Planner
from fastclip.report import Plan
from fastclip.samplers import (
    check_loader,
    check_order,
    check_poisson,
    draws_independently,
    set_steps,
)
from fastclip.sampling import check_secure, draw_securely

FAST_MODES = ("fast", "ghost")
MATERIALISED_MODES = ("hooks", "functorch", "ew")
MODES = (*FAST_MODES, "hooks", "functorch", "ew", "ghost_fsdp", "ghost_tp", "no_op")


class FastPrivacyEngine(PrivacyEngine):
    """Drop-in for `opacus.PrivacyEngine`: same calls, same guarantee, one ordinary backward pass.

    Example:
        >>> engine = FastPrivacyEngine()
        >>> model, optimizer, loader = engine.make_private(
        ...     module=model, optimizer=optimizer, data_loader=loader,
        ...     noise_multiplier=1.0, max_grad_norm=1.0)
        >>> for x, y in loader:
        ...     optimizer.zero_grad()
        ...     criterion(model(x), y).backward()
        ...     optimizer.step()
        >>> engine.get_epsilon(delta=1e-5)

    Args:
        accountant: "prv" (default), "rdp" or "gdp", as in Opacus.
        secure_mode: noise of gradients and counts, and sampling, from ChaCha20 under keys of the
            operating system, guarded against floating-point attacks (docs/secure_mode.md).
        planner: chooses how norms are computed, within its memory budget; `plan()` shows what it
            chose. The default keeps per-sample gradients where they are cheap.
    """

    def __init__(
        self, *, accountant: str = "prv", secure_mode: bool = False, planner: Planner | None = None
    ) -> None:
        if secure_mode:
            require_cipher()
        with warnings.catch_warnings():
            if secure_mode:  # Opacus would look for torchcsprng, or warn that it is turned off
                warnings.filterwarnings("ignore", "Secure RNG turned off")
            super().__init__(accountant=accountant, secure_mode=False)
        self.secure_mode = secure_mode
        if planner is not None and not isinstance(planner, Planner):
            raise ArgumentTypeError(
                f"planner expects a fastclip.Planner or None, got {type(planner).__name__}"
            )
        self._planner = planner or Planner()
        self._keepers: list[BookKeeper] = []

    def make_private(  # type: ignore[override]
        self, *, module: nn.Module, optimizer: torch.optim.Optimizer, criterion: Any = None,
        data_loader: DataLoader, noise_multiplier: float,
        max_grad_norm: float | Sequence[float], batch_first: bool = True,
        loss_reduction: str = "mean", poisson_sampling: bool = True,
        clipping: str | Clipping = "flat", noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "fast", wrap_model: bool = True, rand_on_empty: bool = False,
        **kwargs: Any,
    ) -> tuple:  # fmt: skip
        """Make model, optimizer and data loader private.

        Args:
            module: the model, in training mode. optimizer: over this model's parameters.
            criterion: loss; returned (unchanged) only where grad_sample_mode is "ghost".
            data_loader: its length sets the sampling rate q = 1 / len(data_loader).
            noise_multiplier: sigma, standard deviation of the noise over the sensitivity: the total
                that the accountant sees, of which count queries take their share; of the first step
                where the strategy has a noise schedule.
            max_grad_norm: (first) clipping threshold C; a list, one a parameter tensor, for
                "per_layer".
            batch_first: samples lie along axis 0 of the model's inputs; else along axis 1.
            loss_reduction: "mean" (over the physical batch) or "sum".
            poisson_sampling: sample every row independently with rate q, as accounting assumes.
            clipping: a strategy of fastclip.clipping, or Opacus' "flat", "per_layer" or "adaptive"
                (whose keywords of Opacus are taken, too).
            noise_generator: source of the noise, for reproducible runs.
            grad_sample_mode: "fast"; "ghost" is the same and returns the criterion too; Opacus'
                own modes ("hooks", "functorch", "ew", ...) take their gradients from Opacus' code.
            wrap_model: False intercepts the model in place and returns a handle with `cleanup()`.
            rand_on_empty: an empty batch becomes one made-up row, which contributes nothing.

        Returns:
            (model or handle, optimizer, data loader); with "ghost", (..., criterion, data loader).

        Raises:
            fastclip.errors.*: naming the module or keyword and the way out. Nothing is changed.

        Formal guarantee: every real step of the optimizer is a Gaussian mechanism with noise
        multiplier sigma on a Poisson sample of rate q; `get_epsilon` composes the steps taken.
        """
        validation.choice("grad_sample_mode", grad_sample_mode, MODES)
        criterion = nn.CrossEntropyLoss() if criterion is None else criterion
        if grad_sample_mode not in FAST_MODES:
            if rand_on_empty and grad_sample_mode not in MATERIALISED_MODES:
                raise ArgumentError(
                    f"rand_on_empty=True in grad_sample_mode={grad_sample_mode!r} would train on "
                    "made-up rows; omit it, or use the fast mode, where they contribute nothing"
                )
            if isinstance(clipping, Clipping):
                raise ArgumentError(
                    f"grad_sample_mode={grad_sample_mode!r} clips as Opacus does, which takes "
                    "'flat', 'per_layer' or 'adaptive'; strategies of fastclip.clipping run in the "
                    "fast mode: omit grad_sample_mode"
                )
            made = super().make_private(
                module=module, optimizer=optimizer, criterion=criterion, data_loader=data_loader,
                noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm,  # type: ignore[arg-type]
                batch_first=batch_first, loss_reduction=loss_reduction,
                poisson_sampling=poisson_sampling, clipping=clipping,  # type: ignore[arg-type]
                noise_generator=noise_generator, grad_sample_mode=grad_sample_mode,
                wrap_model=wrap_model, rand_on_empty=rand_on_empty, **kwargs,
            )  # fmt: skip
            if isinstance(made[1], MaterialisedDraws):
                draws = self._watched(made[-1], poisson_sampling, rand_on_empty, required=False)
                made[1].draws = draws
            return made
        validation.check_arguments(
            module=module, data_loader=data_loader, noise_multiplier=noise_multiplier,
            loss_reduction=loss_reduction, noise_generator=noise_generator,
            flags={
                "batch_first": batch_first, "poisson_sampling": poisson_sampling,
                "wrap_model": wrap_model, "rand_on_empty": rand_on_empty,
            },
        )  # fmt: skip
        if noise_generator is not None and self.secure_mode:
            raise ArgumentError("Passing seed is prohibited in secure mode: omit noise_generator")
        validation.check_optimizer(module, optimizer)
        strategy = resolve(clipping, kwargs, noise_multiplier)
        validation.check_schedule(strategy.noise, self.accountant.mechanism())
        module = self._prepare_fast_model(
            module, optimizer, strategy, max_grad_norm, batch_first, loss_reduction, wrap_model
        )
        inner = optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer
        try:
            loader, batch_size, rate = self._prepare_sampling(
                data_loader, poisson_sampling, batch_first, rand_on_empty
            )
            draws = self._watched(
                loader, poisson_sampling, rand_on_empty, required=poisson_sampling
            )
            private = FastDPOptimizer(
                inner, keeper=module.keeper, noise_multiplier=noise_multiplier,
                expected_batch_size=batch_size, loss_reduction=loss_reduction,
                generator=noise_generator, secure_mode=self.secure_mode,
            )  # fmt: skip
        except Exception:
            module.cleanup()
            raise
        if poisson_sampling:
            module.forbid_grad_accumulation()
        module.keeper.batch.draws = draws
        private.attach_step_hook(self._accounting_hook(rate))
        self._keepers = [keeper for keeper in self._keepers if not keeper.batch.retired]
        self._keepers.append(module.keeper)
        if grad_sample_mode == "ghost":
            return module, private, criterion, loader
        return module, private, loader

    def make_private_with_epsilon(  # type: ignore[override]
        self, *, module: nn.Module, optimizer: torch.optim.Optimizer, criterion: Any = None,
        data_loader: DataLoader, target_epsilon: float, target_delta: float, epochs: int,
        max_grad_norm: float | Sequence[float], batch_first: bool = True,
        loss_reduction: str = "mean", poisson_sampling: bool = True,
        clipping: str | Clipping = "flat", noise_generator: torch.Generator | None = None,
        grad_sample_mode: str = "fast", wrap_model: bool = True, rand_on_empty: bool = False,
        **kwargs: Any,
    ) -> tuple:  # fmt: skip
        """`make_private` with the noise multiplier that a privacy budget affords.

        Args:
            target_epsilon, target_delta: the budget, spent after `epochs` passes over the data.
            epochs: number of passes (1 / q steps each). A noise schedule is composed over all of
                them, and the noise multiplier found is that of its first step.
            **kwargs: options of the accountant ("epsilon_tolerance", "alphas", "eps_error", ...);
                what the optimizer of one of Opacus' own modes takes goes to it.
            Everything else as in `make_private`.

        Returns:
            As `make_private`.
        """
        if not isinstance(data_loader, DataLoader):
            raise ArgumentTypeError(
                "data_loader expects a torch.utils.data.DataLoader, got "
                f"{type(data_loader).__name__}"
            )
        check_loader(data_loader)
        validation.check_budget(target_epsilon, target_delta, epochs)
        known = {"epsilon_tolerance", *inspect.signature(self.accountant.get_epsilon).parameters}
        accounting = {name: value for name, value in kwargs.items() if name in known}
        rest = {name: value for name, value in kwargs.items() if name not in known}
        if len(self.accountant) > 0:
            warnings.warn(
                "make_private_with_epsilon assumes that nothing of the budget is spent, but this "
                "engine's accountant has recorded steps: the overall epsilon will be higher",
                stacklevel=2,
            )
        noise_multiplier = find_noise_multiplier(
            target_epsilon=target_epsilon, target_delta=target_delta,
            sample_rate=1 / len(data_loader), steps=math.ceil(epochs * len(data_loader) - 1e-9),
            schedule=clipping.noise if isinstance(clipping, Clipping) else ConstantNoise(),
            accountant=self.accountant.mechanism(), **accounting,
        )  # fmt: skip
        return self.make_private(
            module=module, optimizer=optimizer, criterion=criterion, data_loader=data_loader,
            noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm,
            batch_first=batch_first, loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling, clipping=clipping,
            noise_generator=noise_generator, grad_sample_mode=grad_sample_mode,
            wrap_model=wrap_model, rand_on_empty=rand_on_empty, **rest,
        )  # fmt: skip

    def plan(self) -> Plan:
        """The trainable layers, how each one's norm is computed, and what it holds; print it.

        Shapes and methods are those of the last backward pass of the last model made private.
        """
        return self._require_keepers()[-1].plan_log.plan()

    def explain(
        self, *, module: nn.Module, optimizer: torch.optim.Optimizer | None = None,
        data_loader: DataLoader | None = None, criterion: Any = None, delta: float | None = None,
        poisson_sampling: bool = True, loss_reduction: str = "mean",
    ) -> Explanation:  # fmt: skip
        """What `make_private` would do with these arguments; print it before training.

        It names what is trained and frozen, layers without a rule of their own, whatever would be
        refused, and known traps: rows not drawn by Poisson sampling, a last incomplete batch, delta
        larger than 1 / N, losses that couple samples, noise that can be foreseen. Nothing is
        changed, and no data is looked at.

        Args:
            module: the model, before `make_private`. The rest: as for `make_private`, as far as known.
            delta: that of the epsilon to be stated.

        Returns:
            An Explanation, with `rows`, `frozen`, `slow`, `refused` and `traps`.
        """
        return explain(
            Setup(
                module, optimizer, data_loader, criterion, delta, poisson_sampling, loss_reduction,
                self.secure_mode,
            )
        )  # fmt: skip

    def set_groups(self, ids: Tensor, module: nn.Module | None = None) -> None:
        """Say which group each row of the next backward pass belongs to.

        For strategies of groups, before every backward pass, on physical batches as on whole ones;
        other strategies ignore it, so a training loop may always call it. Ids that no backward pass
        has used are forgotten at the next real step.

        Args:
            ids: int64 [b], from 0 to num_groups - 1. On an accelerator the values are not looked
                at: a row outside the range contributes nothing and counts nowhere.
            module: the private model whose pass comes next, where the engine has several.

        Raises:
            ArgumentError, ArgumentTypeError: for other values, shapes or types, or no such model.
        """
        live = [keeper for keeper in self._require_keepers() if not keeper.batch.retired]
        if module is not None:
            live = [keeper for keeper in live if keeper is getattr(module, "keeper", None)]
        if len(live) != 1:
            raise ArgumentError(
                f"set_groups expects the private model that it speaks of: {len(live)} models of this "
                "engine come into question; pass module=, the model that make_private returned"
            )
        draws = live[0].batch.draws
        live[0].clipping.set_groups(ids, draws is not None and draws.empty_in_hand)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Forward passes made inside contribute nothing, however often they are differentiated.

        For adversarial inputs, saliency maps and the like: gradients of the inputs are exact, the
        parameters receive none.
        """
        keepers = list(self._require_keepers())
        before = [keeper.paused for keeper in keepers]
        for keeper in keepers:
            keeper.paused = True
        try:
            yield
        finally:
            for keeper, paused in zip(keepers, before, strict=True):
                keeper.paused = paused

    def is_compatible(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> bool:
        """Whether `validate` accepts the module."""
        try:
            self.validate(module=module, optimizer=optimizer, data_loader=data_loader)
        except (ValueError, TypeError):
            return False
        return True

    def validate(
        self, *, module: nn.Module, optimizer: Any = None, data_loader: Any = None
    ) -> None:
        """Raise for modules that cannot be trained privately, naming their path and the way out."""
        validation.check_module(module)
        super().validate(module=module, optimizer=optimizer, data_loader=data_loader)

    def _require_keepers(self) -> list[BookKeeper]:
        if not self._keepers:
            raise StepError("call make_private first (in the fast mode): there is no model yet")
        return self._keepers

    def _accounting_hook(self, rate: float) -> Callable[[DPOptimizer], None]:
        """Opacus' hook; a history that it leaves half written by an error is put back."""
        record = self.accountant.get_optimizer_hook_fn(sample_rate=rate)

        def account(optimizer: DPOptimizer) -> None:
            joined = optimizer.accumulated_iterations
            if joined * rate > 1 + 1e-9:
                raise StepError(
                    f"this step joins {joined} batches, more than the {round(1 / rate)} of one pass "
                    "over the data, so rows are in it twice; call optimizer.step() more often"
                )
            before = list(self.accountant.history)
            try:
                record(optimizer)
            except BaseException:
                self.accountant.history = before
                raise

        return account

    def _prepare_fast_model(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, clipping: Clipping,
        max_grad_norm: float | Sequence[float], batch_first: bool, loss_reduction: str,
        wrap_model: bool,
    ) -> FastGradSampleModule | FastGradSampleHooks:  # fmt: skip
        if isinstance(module, (DDP, DPDDP, FSDPModule)):
            raise UnsupportedLayerError(
                f"the fast mode trains on one device so far, got {type(module).__name__}; pass the "
                "bare model, or grad_sample_mode='hooks' for distributed training with Opacus' code"
            )
        wrapper = module if isinstance(module, FastGradSampleModule) else None
        if wrapper is not None:
            module = wrapper._module
        self.validate(module=module)
        path = {p: name for name, p in module.named_parameters()}
        owned = [p for group in optimizer.param_groups for p in group["params"]]
        keeper = BookKeeper(
            {p: path[p] for p in owned if p.requires_grad}, clipping, max_grad_norm,
            mean_loss=loss_reduction == "mean", batch_axis=0 if batch_first else 1,
            frozen={p: path[p] for p in owned if not p.requires_grad}, planner=self._planner,
        )  # fmt: skip
        if wrapper is not None:  # everything is checked: the earlier engine may let go
            wrapper.to_standard_module()
        kind = FastGradSampleModule if wrap_model else FastGradSampleHooks
        return kind(module, keeper=keeper, batch_first=batch_first, loss_reduction=loss_reduction)

    def _prepare_data_loader(  # type: ignore[override]
        self, data_loader: DataLoader, *, poisson_sampling: bool, distributed: bool,
        batch_first: bool = True, rand_on_empty: bool = False,
    ) -> DataLoader:  # fmt: skip
        """Opacus' loader, of as many batches as the given one.

        In secure mode its rows are drawn from cryptographic randomness.
        """
        if poisson_sampling:
            check_poisson(data_loader, distributed)
        else:
            check_order(data_loader)
            if self.secure_mode:
                check_secure(data_loader)
        loader = super()._prepare_data_loader(
            data_loader, poisson_sampling=poisson_sampling, distributed=distributed,
            batch_first=batch_first, rand_on_empty=rand_on_empty,
        )  # fmt: skip
        if poisson_sampling:
            set_steps(loader, len(data_loader))
        if self.secure_mode:
            draw_securely(loader)
        return loader

    @staticmethod
    def _watched(
        loader: DataLoader, poisson_sampling: bool, rand_on_empty: bool, *, required: bool
    ) -> Draws:
        """The draws of a prepared loader, which tells of them from now on.

        Args:
            required: train on nothing else, though the loader was never iterated.
        """
        distinct = None if poisson_sampling else check_order(loader)
        independent = poisson_sampling or draws_independently(loader)
        draws = Draws(independent=independent, required=required, makes_up=rand_on_empty)
        if not isinstance(loader.dataset, IterableDataset):  # whose rows no sampler chooses
            watch_draws(loader, draws, distinct)
        return draws

    def _prepare_optimizer(  # type: ignore[override]
        self, *, optimizer: torch.optim.Optimizer, clipping: str, distributed: bool,
        grad_sample_mode: str, noise_generator: torch.Generator | None = None, **kwargs: Any,
    ) -> DPOptimizer:  # fmt: skip
        """The optimizer of one of Opacus' own modes."""
        kind = optimizer_class(clipping, distributed, grad_sample_mode)
        inner = optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer
        return kind(inner, generator=noise_generator, secure_mode=self.secure_mode, **kwargs)

    def _prepare_sampling(
        self, data_loader: DataLoader, poisson_sampling: bool, batch_first: bool,
        rand_on_empty: bool,
    ) -> tuple[DataLoader, int, float]:  # fmt: skip
        """The loader, the public expected batch size B = int(N q), and the sampling rate q."""
        loader = self._prepare_data_loader(
            data_loader, distributed=False, poisson_sampling=poisson_sampling,
            batch_first=batch_first, rand_on_empty=rand_on_empty,
        )  # fmt: skip
        # N / len, not N * (1 / len), whose rounding can lose a whole sample (49 of 49 batches: B = 0)
        size = int(len(loader.dataset) / len(loader))  # type: ignore[arg-type]
        return loader, size, 1 / len(loader)

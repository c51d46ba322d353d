"""FastPrivacyEngine: opacus.PrivacyEngine with exact clipping in one backward pass."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fastclip.accounting import find_noise_multiplier
from fastclip.backward.bookkeeping import BookKeeper
from fastclip.backward.criterion import check_coupling, check_criterion
from fastclip.backward.one_process import check_not_distributed
from fastclip.clipping import Clipping, ConstantNoise, resolve
from fastclip.errors import ArgumentError, ArgumentTypeError, StepError
from fastclip.explanation import Explanation, Setup, explain
from fastclip.model import validation
from fastclip.model.compatible import compatible
from fastclip.model.module import FastGradSampleHooks, FastGradSampleModule
from fastclip.model.ownership import check_free
from fastclip.noise.keystream import require_cipher
from fastclip.optim.opacus_modes import OpacusModes
from fastclip.optim.optimizer import FastDPOptimizer
from fastclip.planner import Planner
from fastclip.planner.report import Plan

FAST_MODES = ("fast", "ghost")
MATERIALISED_MODES = ("hooks", "functorch", "ew")
MODES = (*FAST_MODES, "hooks", "functorch", "ew", "ghost_fsdp", "ghost_tp", "no_op")


class FastPrivacyEngine(OpacusModes):
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
            criterion: loss, whose reduction must be `loss_reduction`; returned (unchanged) only
                where grad_sample_mode is "ghost".
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
            rand_on_empty: an empty batch becomes one placeholder row, which contributes nothing.

        Returns:
            (model or handle, optimizer, data loader); with "ghost", (..., criterion, data loader).

        Raises:
            fastclip.errors.*: naming the module or keyword and the way out. Nothing is changed.

        Formal guarantee: every real step of the optimizer is a Gaussian mechanism with noise
        multiplier sigma on a Poisson sample of rate q; `get_epsilon` composes the steps taken. It
        holds for poisson_sampling=True, and for neighbours that differ in one row that was added or
        removed, where q and the expected batch size B are public (where they follow from the number
        of rows: one row zeroed out).
        """
        validation.choice("grad_sample_mode", grad_sample_mode, MODES)
        validation.choice("loss_reduction", loss_reduction, ("mean", "sum"))
        if criterion is None:
            criterion = nn.CrossEntropyLoss(reduction=loss_reduction)
        check_criterion(criterion, loss_reduction)
        if grad_sample_mode not in ("ghost_fsdp", "ghost_tp"):  # which take the losses row by row
            check_coupling(criterion)
        validation.check_inner_step(optimizer)
        if grad_sample_mode not in FAST_MODES:
            if rand_on_empty and grad_sample_mode not in MATERIALISED_MODES:
                raise ArgumentError(
                    f"rand_on_empty=True in grad_sample_mode={grad_sample_mode!r} would train on "
                    "placeholder rows; omit it, or use the fast mode, where they contribute nothing"
                )
            if isinstance(clipping, Clipping):
                raise ArgumentError(
                    f"grad_sample_mode={grad_sample_mode!r} clips as Opacus does, which takes "
                    "'flat', 'per_layer' or 'adaptive'; strategies of fastclip.clipping run in the "
                    "fast mode: omit grad_sample_mode"
                )
            return self._make_private_by_opacus(
                module=module, optimizer=optimizer, criterion=criterion, data_loader=data_loader,
                noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm,
                batch_first=batch_first, loss_reduction=loss_reduction,
                poisson_sampling=poisson_sampling, clipping=clipping,
                noise_generator=noise_generator, grad_sample_mode=grad_sample_mode,
                wrap_model=wrap_model, rand_on_empty=rand_on_empty, **kwargs,
            )  # fmt: skip
        validation.check_arguments(
            module=module, data_loader=data_loader, noise_multiplier=noise_multiplier,
            noise_generator=noise_generator,
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
            loader, design = self._prepare_sampling(
                data_loader, poisson_sampling=poisson_sampling, batch_first=batch_first,
                rand_on_empty=rand_on_empty,
            )  # fmt: skip
            draws = self._watched(
                loader, poisson_sampling, rand_on_empty, required=poisson_sampling
            )
            private = FastDPOptimizer(
                inner, keeper=module.keeper, noise_multiplier=noise_multiplier,
                expected_batch_size=design.expected_batch_size, loss_reduction=loss_reduction,
                generator=noise_generator, secure_mode=self.secure_mode,
            )  # fmt: skip
        except Exception:
            module.cleanup()
            raise
        if poisson_sampling:
            module.forbid_grad_accumulation()
        module.keeper.batch.draws = draws
        private.account_with(self._accounting_hook(design.rate))
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
            target_epsilon, target_delta: the budget, spent after `epochs` passes over the data; a
                guarantee as of `get_epsilon`, for Poisson sampling.
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
        design = self._plan_sampling(
            data_loader, poisson_sampling=poisson_sampling, distributed=True
        ).design
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
            sample_rate=design.rate, steps=design.steps_in(epochs),
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
        keeper = self._require_keepers()[-1]
        return keeper.plan_log.plan(keeper.calls.looks)

    def explain(
        self, *, module: nn.Module, optimizer: torch.optim.Optimizer | None = None,
        data_loader: DataLoader | None = None, criterion: Any = None, delta: float | None = None,
        poisson_sampling: bool = True, loss_reduction: str = "mean", batch: Any = None,
    ) -> Explanation:  # fmt: skip
        """What `make_private` would do with these arguments; print it before training.

        It names what is trained and frozen, layers without a rule of their own, whatever would be
        refused, and known traps: rows not drawn by Poisson sampling, a last incomplete batch, delta
        larger than 1 / N, losses that couple samples, noise that can be foreseen. Nothing is
        changed, and no data is looked at but `batch`.

        Args:
            module: the model, before `make_private`. The rest: as for `make_private`, as far as known.
            delta: that of the epsilon to be stated.
            batch: what the model is called with: a tensor, a tuple of arguments, a dictionary of
                keywords. A copy of the model is then run on a few of its rows, as in the first step:
                uses of parameters, refusals of coupled rows, and what that look costs are told, too.

        Returns:
            An Explanation, with `rows`, `frozen`, `slow`, `refused` and `traps`.
        """
        return explain(
            Setup(
                module, optimizer, data_loader, criterion, delta, poisson_sampling, loss_reduction,
                self.secure_mode, batch,
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
        validation.check_training(module)
        validation.check_module(module)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """A copy of the model with what does not train as it is replaced (BatchNorm); validated.

        The model itself is left as it was, wherever its classes were defined; what was tied in it
        is tied in the copy.

        Raises:
            UnsupportedModuleError: for a layer without a replacement, naming the way out.
        """
        fixed = compatible(module)
        validation.check_training(fixed)
        validation.check_module(fixed)
        return fixed

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the ledger, and no model: what was released goes on elsewhere."""
        return {**super().__getstate__(), "_keepers": []}

    def _require_keepers(self) -> list[BookKeeper]:
        if not self._keepers:
            raise StepError("call make_private first (in the fast mode): there is no model yet")
        return self._keepers

    def _prepare_fast_model(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, clipping: Clipping,
        max_grad_norm: float | Sequence[float], batch_first: bool, loss_reduction: str,
        wrap_model: bool,
    ) -> FastGradSampleModule | FastGradSampleHooks:  # fmt: skip
        check_not_distributed(module)
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
        if wrapper is not None:
            check_free(module, keeper.names, again=wrapper)
            wrapper.to_standard_module()  # everything is checked: the earlier engine may let go
        kind = FastGradSampleModule if wrap_model else FastGradSampleHooks
        return kind(module, keeper=keeper, batch_first=batch_first, loss_reduction=loss_reduction)

"""make_private of Opacus' own modes: Opacus' code, with what fastclip guards around it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch import nn

from fastclip._opacus import HANDLES, AbstractGradSampleHooks, check_mode
from fastclip.accounting.segments import new_name, union
from fastclip.backward.guards import say_untrained
from fastclip.data.drawing_engine import DrawingEngine
from fastclip.data.recorded import Releases
from fastclip.errors import ArgumentError, say
from fastclip.model.let_go import found_in, trained_by
from fastclip.model.ownership import batches_of, check_free
from fastclip.optim.inner_step import parameters_of
from fastclip.optim.materialised import optimizer_class
from fastclip.optim.release import agree_to_train
from fastclip.overrides import CRITERION, MODEL, OPTIMIZER, Preparation
from fastclip.parallel.processes import ranks_of_opacus, refuse
from fastclip.parallel.ranks import Ranks


class OpacusModes(DrawingEngine):
    """The part of the engine that serves "hooks", "functorch", "ew", "ghost_fsdp", ..."""

    _new: AbstractGradSampleHooks | None = None
    """What the make_private under way has wrapped."""
    _by_opacus = False
    """A model has been made private in one of these modes."""

    def _go_on_with(
        self, again: Any, module: nn.Module, trained: Mapping[nn.Parameter, str]
    ) -> None:
        """A model that may be made private here, with all that its steps have spent so far.

        Args:
            again: what an earlier make_private returned, whichever engine's, or a copy of that, if the
                model is that.
            trained: the parameters that are to become private, and their names.

        Raises:
            UnsupportedLayerError: another engine holds it.
            ArgumentError: this accountant cannot compose its steps with its own.
        """
        check_free(module, trained, again=again)
        before = found_in(module)
        for batch in batches_of(again, module):
            before += trained_by(batch)
        known = self.accountant.segments()
        segments, protected = known, self.accountant.protected
        try:
            for spent, drawn in before:
                if drawn is not None:
                    self.accountant.drawn.join(drawn)
                segments = union(segments, spent.segments)
                protected = protected.beside(spent.protected)
            if segments == known:
                return
            self.accountant.join(segments, protected)
        except ArgumentError as error:
            raise ArgumentError(
                f"this engine cannot count the steps that are in the model's weights: {error}; to state "
                "an epsilon of each, call cleanup() on what make_private returned first and pass a "
                "copy.deepcopy of the model"
            ) from error
        say(
            "the model was made private before, by another FastPrivacyEngine whose steps are in its "
            "weights: this engine counts them from now on beside its own; for a model that is to begin "
            "anew, call make_private with one that was made anew"
        )

    def _make_private_by_opacus(
        self, *, module: nn.Module, wrap_model: bool, poisson_sampling: bool,
        rand_on_empty: bool, **kwargs: Any,
    ) -> tuple:  # fmt: skip
        """One of Opacus' own modes; on an error the model is left as it was."""
        check_mode(kwargs["grad_sample_mode"], module, wrap_model=wrap_model)
        options = {"wrap_model": wrap_model, "rand_on_empty": rand_on_empty} if HANDLES else {}
        ranks = ranks_of_opacus(module) if isinstance(module, nn.Module) else None
        before, making = self._making, Preparation(self)
        self._making = making
        self._rows = {"batch_first": kwargs["batch_first"], "rand_on_empty": rand_on_empty}
        try:
            if isinstance(module, nn.Module):
                trained = {p: name for name, p in module.named_parameters() if p.requires_grad}
                self._go_on_with(module if wrap_model else None, module, trained)
            self._shared_by = ranks
            made = super().make_private(
                module=module, poisson_sampling=poisson_sampling, **options, **kwargs
            )
            self._check_made(making, made, kwargs["batch_first"])
            if ranks is not None:
                self._agree_to_train(ranks, made[1], trained, **kwargs)
        except Exception as error:
            if self._new is not None:
                self._new.cleanup()
            refuse(ranks, error)
            raise
        finally:
            self._new, self._shared_by, self._making = None, None, before
            del self._rows
        wrapper, optimizer = made[0], made[1]
        optimizer.bind(wrapper, ranks)
        held = set(parameters_of(optimizer))
        say_untrained({p: n for n, p in wrapper._module.named_parameters() if p not in held})
        assert self._drawn_by is not None
        optimizer.batch.draws = making.draws
        releases = Releases(self._drawn_by, making.draws, lambda: self.accountant, ranks)
        optimizer.account_with(releases)
        self._by_opacus = True
        return made

    def _check_made(self, making: Preparation, made: tuple, batch_first: bool) -> None:
        """What overrides have returned is what this engine has made."""
        making.check(MODEL, made[0])
        making.check(OPTIMIZER, made[1])
        if len(made) == 4:
            making.check(CRITERION, made[2])
        self._check_loader(making, made[-1], batch_first=batch_first)

    def _agree_to_train(
        self, ranks: Ranks, private: DPOptimizer, trained: Mapping[nn.Parameter, str], *,
        noise_multiplier: float, max_grad_norm: Any, clipping: str, loss_reduction: str,
        grad_sample_mode: str, **_: Any,
    ) -> None:  # fmt: skip
        """All ranks have been given the same; their steps have one name on all of them.

        Raises:
            ArgumentError: naming what differs.
        """
        held = set(parameters_of(private))
        agree_to_train(
            ranks, private.original_optimizer, {p: n for p, n in trained.items() if p in held},
            noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm, clipping=clipping,
            loss_reduction=loss_reduction, grad_sample_mode=grad_sample_mode,
            secure_mode=self.secure_mode,
        )  # fmt: skip
        self.accountant.share_names(ranks.first(new_name()))

    def _prepare_model(self, module: nn.Module, **kwargs: Any) -> Any:
        ModuleValidator.validate(module, strict=True)  # these modes have no rule for more
        wrapper = super()._prepare_model(module, **kwargs)
        self._new = None if wrapper is module else wrapper
        return wrapper if self._making is None else self._making.keep(MODEL, wrapper)

    def _prepare_criterion(self, **kwargs: Any) -> Any:
        made = super()._prepare_criterion(**kwargs)
        return made if self._making is None else self._making.keep(CRITERION, made)

    def _prepare_optimizer(  # type: ignore[override]
        self, *, optimizer: torch.optim.Optimizer, clipping: str, distributed: bool,
        grad_sample_mode: str, expected_batch_size: float,
        noise_generator: torch.Generator | None = None, **kwargs: Any,
    ) -> DPOptimizer:  # fmt: skip
        """The optimizer of one of Opacus' own modes; B is the fast mode's, on each process its share."""
        kind = optimizer_class(clipping, distributed, grad_sample_mode)
        inner = optimizer.original_optimizer if isinstance(optimizer, DPOptimizer) else optimizer
        assert self._drawn_by is not None
        size = self._drawn_by.expected_batch_size
        if distributed:
            size /= torch.distributed.get_world_size()
        made = kind(
            inner, expected_batch_size=size, generator=noise_generator,
            secure_mode=self.secure_mode, **kwargs,
        )  # fmt: skip
        return made if self._making is None else self._making.keep(OPTIMIZER, made)

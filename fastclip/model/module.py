"""The model that make_private returns, or the handle on a model that stays itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opacus.grad_sample import AbstractGradSampleModule, GradSampleModule
from opacus.layers.dp_rnn import DPRNNBase, RNNLinear
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from fastclip._dynamo import is_one_graph, pass_over
from fastclip._opacus import OPACUS_PARAM_MONKEYPATCH_ATTRS, AbstractGradSampleHooks
from fastclip.backward.batch_norm import is_batch_norm
from fastclip.backward.bookkeeping import BookKeeper
from fastclip.backward.guards import arm, say_untrained
from fastclip.backward.sharded_sums import follow_shards
from fastclip.errors import UnsupportedLayerError
from fastclip.layers import find_rule
from fastclip.layers.customised import MARKS
from fastclip.model import entries, factors
from fastclip.model.bare import may_be_bare
from fastclip.model.interception import ATTRIBUTE, Handle, attach, detach
from fastclip.model.let_go import let_go
from fastclip.model.own_forward import check_copied
from fastclip.model.ownership import check_free, claim
from fastclip.model.scopes import PartScope, RecurrentScope, RootScope, SortedScope, call_root
from fastclip.parallel.processes import (
    bare,
    hold_back,
    is_compiled,
    reduce_again,
    refuse_replicas,
    uncompiled,
)

FOLLOWED = "where it is used"
"""What the plan says of parameters without a layer's rule."""


def install(model: nn.Module, keeper: BookKeeper) -> None:
    """Intercept every trainable layer of `model`; on an error the model is left as it was.

    A compiled model stays compiled, in the regions between its private layers.
    """
    check_free(model, keeper.names)
    check_copied(model)
    for path, module in model.named_modules():
        if is_compiled(module) and is_one_graph(module):
            raise UnsupportedLayerError(
                f"{path or 'the model'} is compiled with fullgraph=True, but private layers run "
                "between compiled regions, which are parts of it; omit fullgraph"
            )
    try:
        _Installer(uncompiled(bare(model)), keeper).run()
        follow_shards(keeper)
        arm(keeper)
    except Exception:
        uninstall(model)
        raise
    say_untrained(keeper.others)
    claim(model, keeper)
    hold_back(keeper.clipping.ranks)


def uninstall(model: nn.Module) -> None:
    """Give every module its own forward back and forget what the engine kept on parameters.

    The optimizers of the book-keepers involved release nothing any more.
    """
    for module in model.modules():
        entries.detach(module)
        factors.give_back(module)
        handle = module.__dict__.get(ATTRIBUTE)
        if handle is not None:
            if any(True for _ in module.parameters(recurse=False)):
                let_go([module], handle.keeper.batch)
            handle.keeper.retire()
            loss, handle.keeper.model_loss = handle.keeper.model_loss, None
            if loss is not None:
                loss.give_back(model)
            detach(module)
    for parameter in model.parameters():
        for name in ("grad_sample", "summed_grad"):
            parameter.__dict__.pop(name, None)
    reduce_again(model)


class _Installer:
    def __init__(self, model: nn.Module, keeper: BookKeeper) -> None:
        self.model, self.keeper = model, keeper
        self.handles: dict[nn.Module, Handle] = {}
        self.owners: dict[nn.Parameter, int] = {}

    def run(self) -> None:
        """Give every trainable module its rule or scope, then intercept them all at once."""
        for path, module in self.model.named_modules():
            factors.write_out(module)
            if is_batch_norm(module):
                self.keeper.batch_norms.append((path, module))
            if isinstance(module, DPRNNBase):
                self._handle(path, module).scopes.append(RecurrentScope())
            elif _own(module) or is_parametrized(module):
                self._layer(path, module)
        self._handle("", self.model).scopes.append(RootScope())
        for module, handle in self.handles.items():
            if handle.rule is None:
                entries.attach_methods(handle.path, module, self.keeper)
                if module is not self.model:
                    handle.scopes.append(PartScope())
            attach(module, handle)
        may_be_bare(self.keeper.bare, self.handles)
        for path, module in self.model.named_modules():
            if self._is_part(module):
                entries.attach_part(path, module, self.keeper)
        self.keeper.calls.known = set(self.model.parameters())
        ranks = self.keeper.clipping.ranks
        if ranks is None or ranks.shards is None:  # else a rank holds parts of parameters
            own = self.keeper.names.keys() | self.keeper.frozen.keys()
            self.keeper.others = {p: n for n, p in self.model.named_parameters() if p not in own}
        for parameter, uses in self.owners.items():
            if uses > 1:
                self.keeper.mark_shared(parameter)

    def _is_part(self, module: nn.Module) -> bool:
        """Runs private layers, and is none: called by itself, it may do anything to their rows."""
        if module in self.handles or not MARKS.isdisjoint(vars(module)):
            return False
        return any(below in self.handles for below in module.modules())

    def _layer(self, path: str, module: nn.Module) -> None:
        handle = self._handle(path, module)
        rule, own = find_rule(module), _own(module)
        self._claim(own)
        if isinstance(module, nn.RNNBase):
            handle.scopes.append(SortedScope())
        if rule is None:  # its parameters are followed wherever they are used
            for name in own:
                self.keeper.plan_log.register(f"{path}.{name}".lstrip("."), FOLLOWED)
            return
        handle.rule = rule
        if isinstance(module, RNNLinear):
            for parameter in own.values():
                self.keeper.mark_shared(parameter)
        self.keeper.plan_log.register(path, rule.name)

    def _claim(self, own: dict[str, nn.Parameter]) -> None:
        for parameter in own.values():
            self.owners[parameter] = self.owners.get(parameter, 0) + 1

    def _handle(self, path: str, module: nn.Module) -> Handle:
        return self.handles.setdefault(module, Handle(path, self.keeper))


def _own(module: nn.Module) -> dict[str, nn.Parameter]:
    return {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}


PREFIX = "_module."
"""Of the keys of a private model's state_dict."""


class FastGradSampleModule(AbstractGradSampleModule):
    """The private model: `m` with its trainable layers intercepted.

    Behaves as `m`: what it has not, `m` is asked for, and what `m` has is set there. Keys of its
    state_dict carry the prefix `_module.`, as with Opacus; load_state_dict takes those of `m`, too, and
    fastclip.unwrap gives `m`.

    Args:
        m: the model.
        keeper: its book-keeper.
        batch_first: as in make_private.
        loss_reduction: as in make_private.
    """

    def __init__(
        self, m: nn.Module, *, keeper: BookKeeper, batch_first: bool = True,
        loss_reduction: str = "mean",
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        attach_keeper(self, m, keeper, batch_first, loss_reduction)

    @pass_over
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return call_root(self._module, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        """What the wrapper has not is the model's own: `model.config`, `model.encode`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_module":  # not there yet
                raise
            return getattr(self._module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What is read from the model is set there, where its forward reads it."""
        parts = self.__dict__.get("_modules", {})
        model = parts.get("_module")
        own = name in vars(self) or name in parts or hasattr(type(self), name)
        if model is None or own or not _has(model, name):
            super().__setattr__(name, value)
        else:
            setattr(model, name, value)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """As torch's; keys of the bare model are as good as those of this one."""
        if not any(key.startswith(PREFIX) for key in state_dict):
            state_dict = {PREFIX + key: value for key, value in state_dict.items()}
        return super().load_state_dict(state_dict, *args, **options)

    def forbid_grad_accumulation(self) -> None:
        self.keeper.batch.accumulation_allowed = False

    def allow_grad_accumulation(self) -> None:
        self.keeper.batch.accumulation_allowed = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `p.grad` and, unless a split batch is being gathered, `p.summed_grad`."""
        self.keeper.zero_grad()
        nn.Module.zero_grad(self, set_to_none)

    def _replicate_for_data_parallel(self) -> Any:
        refuse_replicas()

    def remove_hooks(self) -> None:
        uninstall(self._module)

    cleanup = remove_hooks

    def _close(self) -> None:
        """What Opacus' `to_standard_module` calls."""
        self.cleanup()


GradSampleModule.register(FastGradSampleModule)  # loops unwrap what isinstance tells them is one


class FastGradSampleHooks(AbstractGradSampleHooks):
    """The handle of wrap_model=False; `cleanup()` makes the model ordinary again."""

    def __init__(
        self, m: nn.Module, *, keeper: BookKeeper, batch_first: bool = True,
        loss_reduction: str = "mean",
    ) -> None:  # fmt: skip
        attach_keeper(self, m, keeper, batch_first, loss_reduction)

    forbid_grad_accumulation = FastGradSampleModule.forbid_grad_accumulation
    allow_grad_accumulation = FastGradSampleModule.allow_grad_accumulation
    remove_hooks = FastGradSampleModule.remove_hooks
    cleanup = FastGradSampleModule.cleanup


def _has(model: nn.Module, name: str) -> bool:
    try:
        return hasattr(model, name)
    except Exception:  # a property of its own, which cannot be read now
        return True


def attach_keeper(
    owner: Any, m: nn.Module, keeper: BookKeeper, batch_first: bool, loss_reduction: str
) -> None:
    """`m` becomes private for this book-keeper, and `owner` is what a program holds of it."""
    install(m, keeper)
    keeper.trace.know(m)
    owner.keeper = keeper
    owner.batch_first = batch_first
    owner.loss_reduction = loss_reduction
    owner.grad_accumulation_hook = None
    owner._module = m  # behind what the wrapper has itself: some models have such names, too
    for parameter in m.parameters():
        for name in OPACUS_PARAM_MONKEYPATCH_ATTRS:  # of an engine that is gone without cleanup()
            parameter.__dict__.pop(name, None)
        if parameter.requires_grad:
            parameter.grad_sample = None  # type: ignore[attr-defined]

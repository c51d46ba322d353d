"""The reference: one sample at a time, in float64, by ordinary autograd.

Index letters: b sample; everything else is the parameter's own shape.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.engine.bare import LINEAR
from fastclip.errors import FastclipError
from fastclip.ops.units import UnitSamples

Grads = Mapping[str, torch.Tensor]

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
DTYPES = tuple(TOLERANCE)


@dataclass(frozen=True)
class Batch:
    """What goes into the model and, apart from it, into the loss.

    Attributes:
        args, kwargs: of the model's forward. A tensor's first dimension is b.
        target: of the loss, sliced like the inputs.
        take: (batch, i) -> the batch of sample i alone, for inputs whose first dimension is not b.
    """

    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    target: Any = None
    take: Callable[[Batch, int], Batch] | None = None

    def to(self, dtype: torch.dtype) -> Batch:
        """The same batch with its floating tensors in `dtype`."""

        def cast(leaf: Any) -> Any:
            floating = isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
            return leaf.to(dtype) if floating or isinstance(leaf, PackedSequence) else leaf

        return self._map(cast)

    def row(self, i: int) -> Batch:
        """Sample i as a batch of one."""
        if self.take is not None:
            return self.take(self, i)
        return self._map(
            lambda leaf: leaf[i : i + 1].contiguous() if isinstance(leaf, torch.Tensor) else leaf
        )

    def _map(self, fn: Callable[[Any], Any]) -> Batch:
        args, kwargs, target = tree_map(
            fn,
            (self.args, self.kwargs, self.target),
            is_leaf=lambda node: isinstance(node, PackedSequence),
        )
        return replace(self, args=args, kwargs=kwargs, target=target)


def as_batch(inputs: Batch | torch.Tensor | tuple) -> Batch:
    """A tensor or a tuple of positional arguments as a `Batch`."""
    if isinstance(inputs, Batch):
        return inputs
    return Batch(args=inputs if isinstance(inputs, tuple) else (inputs,))


def sample_loss(output: torch.Tensor, target: Any = None) -> torch.Tensor:
    """Half the squared distance of every row from one fixed pattern: [b, ...] -> [b].

    The gradient with respect to the output differs from row to row, and a row's loss does not
    depend on the other rows, nor on how many there are.
    """
    numel = output.shape[1:].numel()
    pattern = torch.arange(numel, dtype=torch.float64, device=output.device).cos().to(output.dtype)
    return 0.5 * (output.flatten(1) - pattern).square().sum(1)


LossFn = Callable[[Any, Any], torch.Tensor]


def per_sample_gradients(
    model: nn.Module,
    inputs: Batch | torch.Tensor | tuple,
    loss_fn: LossFn = sample_loss,
    names: Iterable[str] | None = None,
    units: UnitSamples | None = None,
) -> dict[str, torch.Tensor]:
    """Gradient of each sample's own loss, float64, from a copy of `model` that sees it alone.

    Args:
        model: not yet private; left untouched. Dropout is switched off in the copy.
        loss_fn: (output, target) -> the losses of the rows, [b].
        names: parameters to differentiate by; all trainable ones if None.
        units: samples are units, whose loss is the mean, or the sum, of their rows'.

    Returns:
        {parameter name: [b, *shape]}; zeros for a parameter that a sample does not touch.
    """
    # contiguous: torch's InstanceNorm is wrong for one sample whose gradient is channels-last
    twin = copy.deepcopy(model).double().to(memory_format=torch.contiguous_format)
    for module in twin.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    chosen = {n: p for n, p in twin.named_parameters() if p.requires_grad}
    if names is not None:
        chosen = {n: chosen[n] for n in names}
    batch = as_batch(inputs).to(torch.float64)
    with torch.no_grad():
        samples = len(loss_fn(twin(*batch.args, **batch.kwargs), batch.target))
    rows: dict[str, list[torch.Tensor]] = {n: [] for n in chosen}
    whose = range(samples) if units is None else units.owner.tolist()
    for sample in range(samples if units is None else units.count):
        losses = []
        for i in (i for i, owner in enumerate(whose) if owner == sample):
            one = batch.row(i)
            own = loss_fn(twin(*one.args, **one.kwargs), one.target)
            if own.shape != (1,):
                raise ValueError(f"row {i} of the batch gave losses of shape {tuple(own.shape)}")
            losses.append(own[0])
        total = torch.stack(losses)
        twin.zero_grad()
        (total.sum() if units is not None and units.reduction == "sum" else total.mean()).backward()
        for name, p in chosen.items():
            rows[name].append(torch.zeros_like(p) if p.grad is None else p.grad.clone())
    return {name: torch.stack(grads) for name, grads in rows.items()}


def norms(grads: Grads) -> torch.Tensor:
    """L2 norm of every sample's gradient over all parameters: [b]."""
    return torch.stack([g.reshape(len(g), -1).norm(dim=1) for g in grads.values()]).norm(dim=0)


def clipped_sum(grads: Grads, threshold: float) -> dict[str, torch.Tensor]:
    """sum_b min(1, threshold / n_b) g_b for every parameter."""
    scale = (threshold / norms(grads)).clamp(max=1.0)
    return {
        name: torch.einsum("b,b...->...", scale, g.to(scale.dtype)) for name, g in grads.items()
    }


def relative_error(x: Grads | torch.Tensor, ref: Grads | torch.Tensor) -> float:
    """||x - ref|| / ||ref|| with all entries flattened together; ||x|| where ref is zero."""
    if isinstance(ref, torch.Tensor):
        x, ref = {"": x}, {"": ref}
    flat_ref = torch.cat([ref[name].double().flatten() for name in ref])
    flat_x = torch.cat([x[name].double().flatten() for name in ref])
    scale = flat_ref.norm().item()
    return (flat_x - flat_ref).norm().item() / (scale or 1.0)


def make_private(
    model: nn.Module,
    *,
    max_grad_norm: float = 1.0,
    loss_reduction: str = "mean",
    noise_multiplier: float = 0.0,
    batch_size: int = 4,
    dataset_size: int = 16,
    optimizer_params: Sequence[Any] | None = None,
    poisson_sampling: bool = False,
    dataset: Dataset | None = None,
    generator: torch.Generator | None = None,
    lr: float = 0.1,
    **kwargs: Any,
) -> tuple:
    """(engine, private model, optimizer, loader) with SGD and a small dataset.

    Args:
        optimizer_params: parameters, or groups of them; every trainable parameter if None.
        dataset: `dataset_size` rows of zeros if None.
        generator: of the loader's sampling.
        kwargs: passed on to `FastPrivacyEngine.make_private`.
    """
    if dataset is None:
        dataset = TensorDataset(torch.zeros(dataset_size, 1))
    if optimizer_params is None:
        optimizer_params = [p for p in model.parameters() if p.requires_grad]
    engine = FastPrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(optimizer_params, lr=lr),
        data_loader=DataLoader(dataset, batch_size=batch_size, generator=generator),
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        loss_reduction=loss_reduction,
        poisson_sampling=poisson_sampling,
        **kwargs,
    )
    return engine, private, optimizer, loader


def backward(
    private: nn.Module,
    inputs: Batch | torch.Tensor | tuple,
    loss_fn: LossFn = sample_loss,
    loss_reduction: str = "mean",
    **kwargs: Any,
) -> None:
    """One forward and one ordinary `loss.backward(**kwargs)` over the mean or sum of the losses."""
    batch = as_batch(inputs)
    losses = loss_fn(private(*batch.args, **batch.kwargs), batch.target)
    (losses.mean() if loss_reduction == "mean" else losses.sum()).backward(**kwargs)


def summed(params: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """A copy of every `summed_grad`, zeros where there is none yet."""
    sums = {n: getattr(p, "summed_grad", None) for n, p in params.items()}
    return {n: torch.zeros_like(params[n]) if s is None else s.clone() for n, s in sums.items()}


def assert_sums(actual: Grads, expected: Grads, tol: float) -> None:
    """Together within `tol`, and each parameter within 10 tol of itself plus 1% of the total.

    The 1% lets a parameter whose gradient is zero in exact arithmetic (the key bias of softmax
    attention) hold rounding errors of the others' size.
    """
    assert relative_error(actual, expected) <= tol
    total = torch.stack([e.norm() for e in expected.values()]).norm()
    for name, ref in expected.items():
        error = (actual[name].double() - ref).norm()
        assert error <= 10 * tol * (ref.norm() + 0.01 * total), f"{name}: off by {error:.3e}"


def check_exact(
    model: nn.Module,
    inputs: Batch | torch.Tensor | tuple,
    loss_fn: LossFn = sample_loss,
    *,
    dtype: torch.dtype,
    C: float | None = None,
    tol: float | None = None,
    norm_tol: float | None = None,
    loss_reduction: str = "mean",
    optimizer_names: Sequence[str] | None = None,
    units: Callable[[int], UnitSamples] | None = None,
    **kwargs: Any,
) -> None:
    """A backward pass of the engine in `dtype` against the oracle on the same, rounded, numbers; and a
    later one, in which linear layers may be nodes of C++.

    Args:
        model: left untouched; a copy is made private.
        C: clipping threshold; between the two middle norms if None, so that some samples are
            clipped and some are not.
        tol: relative error of the sums; norm_tol: of the norms, `tol` if None.
        optimizer_names: parameters that the optimizer holds; all trainable ones if None.
        units: those that so many rows are clipped by; None: by themselves.
        kwargs: passed on to `make_private`.
    """
    tol = TOLERANCE[dtype] if tol is None else tol
    model = copy.deepcopy(model).to(dtype)
    batch = as_batch(inputs).to(dtype)
    joined = None
    if units is not None:
        with torch.no_grad():
            twin = copy.deepcopy(model)
            joined = units(len(loss_fn(twin(*batch.args, **batch.kwargs), batch.target)))
    grads = per_sample_gradients(model, batch, loss_fn, optimizer_names, joined)
    ref_norms = norms(grads)
    if C is None:
        C = ref_norms.quantile(0.5).item()
        if units is not None:  # few, of which the middle one may be the smallest
            C = (0.5 * (ref_norms.min() + ref_norms.max())).item()
        if len(ref_norms) > 1:
            assert ref_norms.min() < C < ref_norms.max(), "the case clips all samples or none"
    params = dict(model.named_parameters())
    _, private, optimizer, _ = make_private(
        model,
        max_grad_norm=C,
        loss_reduction=loss_reduction,
        optimizer_params=[params[n] for n in grads],
        **kwargs,
    )
    optimizer.grad_state.batch.next_units = joined
    backward(private, batch, loss_fn, loss_reduction)

    assert [n for n, p in params.items() if p.grad is not None] == []  # autograd made no dL/dw
    assert optimizer.per_sample_norms.shape == ref_norms.shape
    assert relative_error(optimizer.per_sample_norms, ref_norms) <= (norm_tol or tol)
    wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
    for name in grads:
        found = params[name].summed_grad
        if found is None:  # no use of it reached the loss
            assert not grads[name].any(), f"{name}: no sum"
            continue
        assert found.shape == params[name].shape, name
        assert found.dtype == wide.get(dtype, dtype), name
    assert_sums(summed({n: params[n] for n in grads}), clipped_sum(grads, C), tol)
    drops = any(isinstance(module, nn.Dropout) and module.p for module in model.modules())
    if drops or not any(type(h.rule) in LINEAR for h, _ in private.grad_state.bare.layers):
        return
    for _ in range(3):  # the first steps are traced; in later ones layers may be bare
        optimizer.zero_grad()
        optimizer.grad_state.batch.next_units = joined
        backward(private, batch, loss_fn, loss_reduction)
    assert relative_error(optimizer.per_sample_norms, ref_norms) <= (norm_tol or tol)
    assert_sums(summed({n: params[n] for n in grads}), clipped_sum(grads, C), tol)


def check_exact_or_refused(*args: Any, **kwargs: Any) -> None:
    """`check_exact`, for what an engine may decline, by name, but must never get wrong."""
    try:
        check_exact(*args, **kwargs)
    except FastclipError as error:
        refusal = str(error)
    else:
        return
    assert len(refusal) > 40

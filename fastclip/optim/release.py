"""From the clipped sums of a logical batch to the gradients of its one release."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from fastclip import ops
from fastclip.backward.bookkeeping import BookKeeper
from fastclip.backward.clipping_state import ClippingState
from fastclip.backward.sharded_sums import ShardedSums
from fastclip.errors import ArgumentError
from fastclip.noise import NoiseSource
from fastclip.parallel import release
from fastclip.parallel.digest import digest, number_of
from fastclip.parallel.ranks import Ranks, whole_of


def released(
    parameters: Sequence[nn.Parameter], take: Callable[[], list[Tensor | None]],
    record: Callable[[], None], std: float | Tensor, divisor: float, noise: NoiseSource,
) -> list[Tensor]:  # fmt: skip
    """(sum + N(0, std^2)) / divisor for every parameter, in one process: the mechanism of every mode.

    Args:
        take: the clipped sums, which serve once. record: writes the release down; it is called when
            nothing can be refused any more, before noise is drawn.
    """
    sums = take()
    record()
    return ops.noise_finalize(sums, list(parameters), std, divisor, noise)


def noisy_gradients(
    keeper: BookKeeper, parameters: Sequence[nn.Parameter], batches: int, divisor: float,
    record: Callable[[], None],
) -> list[Tensor]:  # fmt: skip
    """(sum + N(0, (sigma_grad S)^2)) / divisor for every parameter; over all ranks that train.

    Args:
        batches: that the logical batch consists of. record: as of `released`; several ranks record
            when they have exchanged sums and counts, without which there is no step.

    Raises:
        ArgumentError: for a noise multiplier that no noise has.
        StepError: the sums are not what was clipped, or the ranks are not in one step.
    """
    state = keeper.clipping
    std, given = _noise_std(state), keeper.sums
    if state.ranks is None:
        take = partial(given.take_all, parameters)
        return released(parameters, take, record, std, divisor, state.noise)
    told: dict[str, float] = {"step": state.step, "batches": batches, "divisor": divisor}
    told["noise_multiplier"] = state.noise_multiplier
    if isinstance(given, ShardedSums):
        told["backward passes in the sums"] = given.passes
    if isinstance(std, Tensor):
        std = state.ranks.largest(std)  # ranks that clip at other thresholds would need it
    else:
        told["noise_std"] = std
    whole = [whole_of(state.ranks, p) for p in parameters]
    told |= names_told(keeper.names.get(p, "") for p in whole)
    state.ranks.in_step(**told)
    rest: Any = parameters, std, divisor, state.noise
    if isinstance(given, ShardedSums):
        return release.noisy_shards(state.ranks, given.buckets, given.parts(), *rest)
    return release.noisy_gradients(state.ranks, [given.take(p) for p in parameters], *rest)


def divisor_of(optimizer: Any, batches: int) -> float:
    """The public number by which a sum of so many batches is divided."""
    mean = optimizer.loss_reduction != "sum"
    return float(optimizer.expected_batch_size) * batches if mean else 1.0


def check_alike(keeper: BookKeeper, optimizer: Any, **settings: Any) -> None:
    """All ranks that train are about to train the same model, in the same way; one process is.

    The settings of the inner `optimizer` are compared in every step.

    Raises:
        ArgumentError: naming what differs.
    """
    state = keeper.clipping
    if state.ranks is None:
        return
    agree_to_train(
        state.ranks, optimizer, keeper.names, noise_multiplier=state.first_multiplier,
        max_grad_norm=[value.tolist() for value in state.next.tensors().values()],
        clipping=re.sub(r" at 0x[0-9a-f]+", "", repr(state.strategy)), **settings,
    )  # fmt: skip


def agree_to_train(
    ranks: Ranks, optimizer: Any, names: Mapping[nn.Parameter, str], **settings: Any
) -> None:
    """`check_alike` of any mode.

    Args:
        optimizer: the inner one. names: of the trained parameters.
    """
    wrapper, settings_of = ranks.wrapper, partial(_settings, ref(optimizer))
    assert wrapper is not None
    ranks.followed["a digest of the optimizer's settings (lr, ...)"] = settings_of
    replicated = () if isinstance(wrapper, FSDPModule) else wrapper.parameters()
    ranks.agree(
        {
            "trained parameters": [(n, tuple(p.shape), str(p.dtype)) for p, n in names.items()],
            "weights": digest([*replicated, *wrapper.buffers()]),
            **settings,
        }
    )
    ranks.check_replicas()


def names_told(names: Iterable[str]) -> dict[str, float]:
    """What ranks tell each other in a step of the parameters that it trains."""
    return {"a digest of the trained parameters' names (requires_grad)": number_of(list(names))}


def _noise_std(state: ClippingState) -> float | Tensor:
    """sigma_grad * S; a tensor where S lies on an accelerator, which must not be waited for."""
    sigma = state.noise_multiplier
    if not 0 <= sigma < float("inf"):
        raise ArgumentError(f"noise_multiplier expects a finite number >= 0, got {sigma}")
    noise, sensitivity = state.gradient_noise(), state.sensitivity()
    if not noise or sensitivity.device.type == "cpu":
        return noise * float(sensitivity) if noise else 0.0
    return noise * sensitivity


def _settings(held: ref[Any]) -> float:
    """A number that tells an optimizer's settings from others; tensors among them are not read."""
    optimizer = held()
    assert optimizer is not None, "somebody steps with it"
    told = [
        (name, value)
        for group in optimizer.param_groups
        for name, value in sorted(group.items())
        if not isinstance(value, (Tensor, list))
    ]
    return number_of((type(optimizer).__name__, told))

"""The parameters of a model that fully_shard has spread over ranks, and how sums come to their owners.

A layer computes with whole parameters, which FSDP2 gathers for it and lets go of; the optimizer holds
this rank's shards. Both are the same tensors in every step, so each whole parameter stands for its
shard: it is the private one, and what is summed for it goes to the ranks that hold its shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from fastclip.core.numerics import accumulation_dtype
from fastclip.core.torch_names import at_rest, casts_at_rest
from fastclip.errors import ArgumentError, StepError

# -------------------------------------------------------------------------------------------------
# What two processes compare in the place of tensors.


def digest(tensors: Iterable[Tensor]) -> str:
    """Of their shapes, types and entries, bit for bit; of sparse ones shapes and types alone."""
    found = hashlib.sha256()
    for x in tensors:
        found.update(f"{tuple(x.shape)} {x.dtype}".encode())
        if x.layout == torch.strided:
            entries: Any = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            found.update(entries)
    return found.hexdigest()[:16]


def number_of(settings: Any) -> float:
    """A number that tells settings (plain values) from others, the same in every process."""
    return float(crc32(repr(settings).encode()))


# -------------------------------------------------------------------------------------------------
# What is said where another rank does not answer.


@contextmanager
def reaching() -> Iterator[None]:
    """Other ranks are asked, or told, something inside.

    Raises:
        StepError: one of them cannot be reached.
    """
    try:
        yield
    except RuntimeError as error:
        raise StepError(
            "Another rank cannot be reached, because it has ended, failed or does something else, so "
            f"this step is not released. Continue from the last checkpoint ({error}).",
            doc="several-processes",
        ) from error


# -------------------------------------------------------------------------------------------------


# named so since torch 2.13
_reduce_scatter: Any = getattr(distributed, "reduce_scatter_single", None)
if _reduce_scatter is None:
    _reduce_scatter = distributed.reduce_scatter_tensor


class Sharded:
    """One parameter: `own`, which the optimizer holds, and `whole`, with which layers compute."""

    def __init__(self, own: DTensor, whole: nn.Parameter) -> None:
        self.own, self.whole = own, whole
        *replicate, shard = range(own.device_mesh.ndim)
        placement = own.placements[shard]
        assert isinstance(placement, Shard)
        self.dim = placement.dim
        self.group = own.device_mesh.get_group(shard)
        self.replicas = own.device_mesh.get_group(replicate[0]) if replicate else None
        self.dtype = accumulation_dtype(own.dtype)
        self.number = own.device_mesh.get_local_rank(shard)
        """Of the shard."""
        ranks = distributed.get_world_size(self.group)
        size = list(own.shape)
        size[self.dim] = -(-size[self.dim] // ranks)
        self.length = torch.Size(size).numel()
        """Entries of the largest shard."""

    @property
    def local(self) -> Tensor:
        """This rank's part of the weights."""
        return self.own.to_local().detach()

    def as_own(self, local: Tensor) -> DTensor:
        """A tensor that is spread as the parameter is, of which this rank has `local`."""
        return DTensor.from_local(
            local, self.own.device_mesh, self.own.placements, run_check=False, shape=self.own.shape,
            stride=self.own.stride(),
        )  # fmt: skip


class Shards:
    """All parameters of a model of which fully_shard has made shards.

    Args:
        model: spread as a whole. Every rank makes this at the same time: parameters are gathered.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        if not all(map(casts_at_rest, self._modules)):
            raise ArgumentError(
                "MixedPrecisionPolicy of fully_shard expects torch 2.13, got "
                f"{torch.__version__}. Use torch.autocast, or cast_forward_inputs=False without an "
                "output_dtype, and cast the inputs yourself.",
                doc="sharded-models",
            )
        self.gathered = False
        """All parameters are whole."""
        spread = dict(model.named_parameters(remove_duplicate=False))
        with self.whole():
            found = dict(model.named_parameters(remove_duplicate=False))
            self.parameters = {
                found[name]: Sharded(own, found[name])
                for name, own in spread.items()
                if isinstance(own, DTensor)
            }
        self._of = {each.own: whole for whole, each in self.parameters.items()}
        self._places: list[tuple[nn.Module, str, Any]] = [
            (module, name, spread[f"{path}.{name}".lstrip(".")])
            for path, module in model.named_modules()
            for name in module._parameters
            if f"{path}.{name}".lstrip(".") in spread
        ]
        """Where each is in the model."""

    def whole_of(self, parameter: Any) -> Any:
        """The parameter with which layers compute, of one that the optimizer holds."""
        return self._of.get(parameter, parameter)

    def check_held(self) -> None:
        """The model has the parameters that it had, which the optimizer trains.

        Raises:
            StepError: naming one that another has replaced.
        """
        for module, name, own in self._places:
            held: Any = module._parameters.get(name)
            other = isinstance(held, DTensor) and held is not own
            if other and held.device_mesh == own.device_mesh:  # else fully_shard's, of another mesh
                raise StepError(
                    f"Parameter {name!r} of a {type(module).__name__} was replaced after make_private "
                    "(load_state_dict(assign=True)), so it would not be trained. Load without assign, "
                    "or call make_private again.",
                    doc="changed-model",
                )

    def told(self) -> tuple[Any, str]:
        """Which shards this rank holds, and a digest of them."""
        meshes = {each.own.device_mesh: each.number for each in self.parameters.values()}
        return tuple(meshes.values()), digest(each.local for each in self.parameters.values())

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, all parameters are whole, and modules run as if they had never been spread.

        Every rank enters at the same time.
        """
        spread = [module for module in self._modules if _is_spread(module)]
        for module in self._modules:
            module.unshard()
        try:
            with at_rest(self._modules):
                self.gathered = True
                yield
        finally:
            self.gathered = False
            for module in spread:
                module.reshard()


def let_go(model: nn.Module) -> bool:
    """Whether fully_shard has spread a model; its parameters, some whole since an evaluation, are shards
    again. No other rank is asked."""
    spread = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in spread:
        module.reshard()
    return bool(spread)


def check_whole(model: nn.Module, doing: str) -> None:
    """Refuse to copy a model that fully_shard has spread, which torch does not let anybody do.

    Args:
        doing: what for, with the way out.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ArgumentError(
            f"The model is sharded by fully_shard. {doing[:1].upper()}{doing[1:]}",
            doc="sharded-models",
        )


def _is_spread(module: nn.Module) -> bool:
    """A parameter of its own (not of a part that is spread by itself) is not whole."""
    held = list(module.parameters(recurse=False))
    below = list(module.children())
    while below:
        part = below.pop()
        if not isinstance(part, FSDPModule):
            held += part.parameters(recurse=False)
            below += part.children()
    return any(isinstance(p, DTensor) for p in held)


class Bucket:
    """Sums of some parameters that go to their owners at once.

    Args:
        parameters: spread over the same ranks, with sums of one type.
    """

    def __init__(self, parameters: Sequence[Sharded]) -> None:
        self.parameters = parameters
        first = parameters[0]
        self._group, self.replicas = first.group, first.replicas
        self.first_replica = self.replicas is None or not distributed.get_rank(self.replicas)
        self._ranks = distributed.get_world_size(self._group)
        self.dtype, self.device = first.dtype, first.local.device
        self.length = sum(each.length for each in parameters)

    def scattered(self, sums: Sequence[Tensor | None]) -> Tensor:
        """This rank's part of the sum over all ranks that hold shards, one after the other, [length].

        Args:
            sums: of whole parameters; None where no sample of this rank has touched it.
        """
        device = next((total.device for total in sums if total is not None), self.device)
        flat = torch.zeros(self._ranks, self.length, dtype=self.dtype, device=device)
        at = 0
        for each, total in zip(self.parameters, sums, strict=True):
            parts = () if total is None else total.chunk(self._ranks, each.dim)  # no empty ones
            for to, part in zip(flat, parts, strict=False):
                to[at : at + part.numel()].view(part.shape).copy_(part)
            at += each.length
        part = torch.empty(self.length, dtype=self.dtype, device=device)
        with reaching():
            _reduce_scatter(part, flat.view(-1), group=self._group)
        return part.to(self.device)

    def views(self, part: Tensor) -> Iterator[Tensor]:
        """Of what `scattered` gives: this rank's shards."""
        at = 0
        for each in self.parameters:
            local = each.local
            yield part[at : at + local.numel()].view(local.shape)
            at += each.length


def buckets(parameters: Iterable[Sharded], most: int) -> list[Bucket]:
    """Neighbors that are spread alike, of `most` bytes at once unless one is larger."""
    found: list[list[Sharded]] = []
    kind, size = None, 0
    for each in parameters:
        its, more = (each.own.device_mesh, each.dtype), each.whole.numel() * each.dtype.itemsize
        if kind != its or size + more > most:
            found.append([])
            kind, size = its, 0
        found[-1].append(each)
        size += more
    return [Bucket(together) for together in found]

"""The parameters of a model that fully_shard has sharded over ranks, and the sums for each shard.

A layer computes with whole parameters, which FSDP2 gathers for it and frees. The optimizer holds this
rank's shards. Both are the same tensors in every step, so each whole parameter represents its shard. It
is the private parameter, and its sums go to the ranks that hold its shards.
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
# Digests that two processes compare instead of tensors.


def digest(tensors: Iterable[Tensor]) -> str:
    """Returns a digest of shapes, types and entries, bit for bit. For sparse tensors, no entries."""
    found = hashlib.sha256()
    for x in tensors:
        found.update(f"{tuple(x.shape)} {x.dtype}".encode())
        if x.layout == torch.strided:
            entries: Any = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            found.update(entries)
    return found.hexdigest()[:16]


def number_of(settings: Any) -> float:
    """Returns a number that identifies settings (plain values), the same in every process."""
    return float(crc32(repr(settings).encode()))


# -------------------------------------------------------------------------------------------------
# The error if another rank does not answer.


@contextmanager
def reaching() -> Iterator[None]:
    """Converts errors of an exchange with other ranks inside.

    Raises:
        StepError: a rank cannot be reached.
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
    """One parameter, with `own`, which the optimizer holds, and `whole`, with which layers compute."""

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
        """Number of the shard."""
        ranks = distributed.get_world_size(self.group)
        size = list(own.shape)
        size[self.dim] = -(-size[self.dim] // ranks)
        self.length = torch.Size(size).numel()
        """Number of entries of the largest shard."""

    @property
    def local(self) -> Tensor:
        """This rank's part of the weights."""
        return self.own.to_local().detach()

    def as_own(self, local: Tensor) -> DTensor:
        """Returns a tensor that is sharded as the parameter, of which this rank has `local`."""
        return DTensor.from_local(
            local, self.own.device_mesh, self.own.placements, run_check=False, shape=self.own.shape,
            stride=self.own.stride(),
        )  # fmt: skip


class Shards:
    """All parameters of a model that fully_shard has sharded.

    Every rank creates this at the same time, because parameters are gathered.

    Args:
        model: the model, sharded as a whole.
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
        """Whether all parameters are whole."""
        sharded = dict(model.named_parameters(remove_duplicate=False))
        with self.whole():
            found = dict(model.named_parameters(remove_duplicate=False))
            self.parameters = {
                found[name]: Sharded(own, found[name])
                for name, own in sharded.items()
                if isinstance(own, DTensor)
            }
        self._of = {each.own: whole for whole, each in self.parameters.items()}
        self._places: list[tuple[nn.Module, str, Any]] = [
            (module, name, sharded[f"{path}.{name}".lstrip(".")])
            for path, module in model.named_modules()
            for name in module._parameters
            if f"{path}.{name}".lstrip(".") in sharded
        ]
        """Module, name and shard of each parameter in the model."""

    def whole_of(self, parameter: Any) -> Any:
        """Returns the parameter with which layers compute, for one that the optimizer holds."""
        return self._of.get(parameter, parameter)

    def check_held(self) -> None:
        """Checks that the model still has the parameters that the optimizer trains.

        Raises:
            StepError: a parameter was replaced. It names the parameter.
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

    def described(self) -> tuple[Any, str]:
        """Returns which shards this rank holds, and a digest of them."""
        meshes = {each.own.device_mesh: each.number for each in self.parameters.values()}
        return tuple(meshes.values()), digest(each.local for each in self.parameters.values())

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Makes all parameters whole inside. Modules run as if they were not sharded.

        Every rank enters at the same time.
        """
        sharded = [module for module in self._modules if _is_sharded(module)]
        for module in self._modules:
            module.unshard()
        try:
            with at_rest(self._modules):
                self.gathered = True
                yield
        finally:
            self.gathered = False
            for module in sharded:
                module.reshard()


def let_go(model: nn.Module) -> bool:
    """Reshards parameters that are whole after an evaluation. No other rank takes part.

    Returns:
        Whether fully_shard has sharded the model.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        module.reshard()
    return bool(sharded)


def check_whole(model: nn.Module, doing: str) -> None:
    """Checks that fully_shard has not sharded a model, as torch cannot copy a sharded one.

    Args:
        doing: the purpose of the copy, with the suggested fix.

    Raises:
        ArgumentError: the model is sharded.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ArgumentError(
            f"The model is sharded by fully_shard. {doing[:1].upper()}{doing[1:]}",
            doc="sharded-models",
        )


def _is_sharded(module: nn.Module) -> bool:
    """Whether a parameter of the module, outside parts that are sharded separately, is not whole."""
    held = list(module.parameters(recurse=False))
    below = list(module.children())
    while below:
        part = below.pop()
        if not isinstance(part, FSDPModule):
            held += part.parameters(recurse=False)
            below += part.children()
    return any(isinstance(p, DTensor) for p in held)


class Bucket:
    """Sums of some parameters that go to the ranks of their shards in one exchange.

    Args:
        parameters: parameters that are sharded over the same ranks, with sums of one type.
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
        """Returns this rank's part of the sums over all ranks that hold shards, concatenated, [length].

        Args:
            sums: sums of whole parameters. None: no sample of this rank has touched the parameter.
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
        """Yields this rank's shards of the result of `scattered`."""
        at = 0
        for each in self.parameters:
            local = each.local
            yield part[at : at + local.numel()].view(local.shape)
            at += each.length


def buckets(parameters: Iterable[Sharded], most: int) -> list[Bucket]:
    """Groups adjacent parameters that are sharded alike, of `most` bytes unless one is larger."""
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

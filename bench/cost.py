"""Measures costs of a step that machine noise cannot change: FLOPs, bytes, calls, memory.

    python -m bench.cost
    python -m bench.cost --workloads bert --where

One step of each workload, private and not, runs under a dispatch mode. Views are not counted. `bytes`
are those of the operands that operators read and of the results that they write. They limit a step on
a CPU. The norm computations of fastclip._host count as one operator each. `--where` names the
functions of fastclip that called the operators. `held` is the peak of allocated memory above the built
model. It does not include the first dry run, or memory that an allocator caches.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from tqdm import tqdm

from bench.measure import heading
from bench.training import Training
from bench.workloads import WARM_UP, WORKLOADS
from fastclip.core import noted, torch_names
from fastclip.ops import ConvGeometry, dispatch

OUT = Path(__file__).resolve().parent / "results" / "cost.json"
FASTCLIP = str(Path(__file__).resolve().parents[1] / "fastclip")
DEFAULT = ["resnet18", "bert", "vit", "bert_lean", "vit_lean"]
_EMPTY = (torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty)
KINDS = ("flops", "bytes", "calls", "allocations", "held")


class Cost(TorchDispatchMode):
    """Counts the operators that run inside, from the whole program.

    Attributes:
        total: FLOPs (of products, as torch counts them), bytes, calls and allocations (results in
            memory of their own).
        places: the same by the function of fastclip that called them, "" for all others.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total: Counter[str] = Counter()
        self.places: dict[str, Counter[str]] = defaultdict(Counter)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if _is_view(func):
            return out
        given = list(_tensors((args, kwargs)))
        held = {x.untyped_storage().data_ptr() for x in given}
        found = list(_tensors(out))
        fresh = sum(x.untyped_storage().data_ptr() not in held for x in found)
        if func.overloadpacket in _EMPTY:  # nothing is written yet
            found = []
        flops = flop_registry.get(func._overloadpacket)
        self._count(
            0 if flops is None else flops(*args, **kwargs, out_val=out), given + found, fresh
        )
        return out

    def count_loop(self, name: str, args: tuple, out: Any) -> None:
        """Counts a computation of fastclip._host, which is no operator of torch, with its results."""
        self._count(LOOP_FLOPS[name](*args), [*_tensors(args), *_tensors(out)], 0)

    def _count(self, flops: int, moved: list[Tensor], allocations: int) -> None:
        counted = {
            "flops": flops, "bytes": sum(map(_size, moved)), "calls": 1, "allocations": allocations,
        }  # fmt: skip
        self.total.update(counted)
        self.places[_caller()].update(counted)


def _product(a: Tensor, g: Tensor, *_: Any) -> int:
    return 2 * a.numel() * g.shape[2]


def _convolution(x: Tensor, g: Tensor, geometry: ConvGeometry, *_: Any) -> int:
    return 2 * g.numel() * torch.Size(geometry.weight_shape[1:]).numel()


def _half(x: Tensor) -> int:
    return x.numel() * (x.shape[1] + 1)


def _halves(pairs: Sequence[tuple[Tensor, Tensor]]) -> int:
    inputs = [a.data_ptr() for a, _ in pairs]
    new = [k == 0 or own != inputs[k - 1] for k, own in enumerate(inputs)]
    return sum(_half(g) + _half(a) * first for (a, g), first in zip(pairs, new, strict=True))


LOOP_FLOPS: dict[str, Callable[..., int]] = {
    "gradients_with_norms": _product,
    "wide_gradients": _product,
    "conv_gradients_with_norms": _convolution,
    "wide_conv_gradients": _convolution,
    "wide_gram": _half,
    "gram_dots": lambda gram, g: _half(g),
    "gram_norms": _halves,
    "parted_sum": lambda parts, scale: 2 * sum(map(Tensor.numel, parts)),
    "layer_norm_backward": lambda *args: 0,  # torch counts only matrix products
    "group_norm_backward": lambda *args: 0,
    "patch_products": lambda *args: 0,
}
"""FLOPs of the norm computations of fastclip._host, counted as in torch."""


@contextmanager
def _loops_counted(cost: Cost) -> Iterator[None]:
    """Counts the loops of fastclip._host while the context is open."""
    loops = dispatch._load("host")
    real = {name: loops[name] for name in LOOP_FLOPS.keys() & loops}

    def counted(name: str) -> Callable[..., Any]:
        def loop(*args: Any) -> Any:
            out = real[name](*args)
            if out is not NotImplemented:
                cost.count_loop(name, args, out)
            return out

        return loop

    loops.update({name: counted(name) for name in real})
    try:
        yield
    finally:
        loops.update(real)


def _is_view(func: Any) -> bool:
    """Whether the operator returns a view of an argument, or only a property."""
    returns = func._schema.returns
    views = [r.alias_info is not None and not r.alias_info.is_write for r in returns]
    return not returns or all(views) or func.namespace == "prim"


def _tensors(value: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(value) if isinstance(x, Tensor))


def _size(x: Tensor) -> int:
    """Bytes of its entries, with those of an expanded tensor counted once."""
    expanded = [n for n, stride in zip(x.shape, x.stride(), strict=True) if stride == 0 and n]
    return x.numel() * x.element_size() // torch.Size(expanded).numel()


_OF_ALL = frozenset((dispatch.__file__, noted.__file__, torch_names.__file__))
"""Functions that every operation of a kind passes through, whatever its caller."""


def _caller() -> str:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        of_all = code.co_name == "guarded" or code.co_filename in _OF_ALL
        if code.co_filename.startswith(FASTCLIP) and not of_all:
            return f"{Path(code.co_filename).stem}.{code.co_qualname}"
        frame = frame.f_back
    return ""


def step_cost(step: Callable[[], Any]) -> Cost:
    """Measures the cost of `step`."""
    with Cost() as cost, _loops_counted(cost):
        step()
    return cost


def most_held(step: Callable[[], Any], built: Mapping[int, UntypedStorage]) -> int:
    """The peak of allocated bytes in a step that follows another.

    Args:
        built: what `held_now` found before, which does not count. That it is kept alive in here is
            needed: nothing of it can be let go in the step, nor its memory become another tensor's.
            What takes the place of one of these tensors counts.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        step()  # what it frees was allocated before, and is not seen
        before = sum(x.nbytes() for at, x in held_now().items() if at not in built)
        with record_function("the step"):
            step()
    events = seen.profiler.kineto_results.events()
    (own,) = (event for event in events if event.name() == "the step")
    moves = sorted(
        (event.start_ns(), number, event.nbytes())
        for number, event in enumerate(events)
        if event.name() == "[memory]" and own.start_ns() <= event.start_ns() <= own.end_ns()
    )
    return before + max(accumulate((size for *_, size in moves), initial=0))


def held_now() -> dict[int, UntypedStorage]:
    """Memory of all tensors known to Python, by address, while no graph is alive.

    A gradient that no Python code has read, not even an optimizer, is not among them.
    """
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) in (Tensor, nn.Parameter)]
    storages = [x.untyped_storage() for x in found if _is_plain(x)]
    return {storage.data_ptr(): storage for storage in storages}


def _is_plain(x: Tensor) -> bool:
    """Whether it has its own memory on the CPU, unlike a leftover of a torch.func transform."""
    try:
        return x.device.type == "cpu" and x.layout is torch.strided and x.data_ptr() >= 0
    except RuntimeError:
        return False


def compare(workload: str, batch_size: int | None = None) -> dict[str, Any]:
    """Costs of a non-private and a private step of this workload, after warm-up steps.

    Returns:
        non_private, fastclip: by kind. ratio: of the two. places: of fastclip's, by function.
    """
    costs = {}
    for mode in ("non_private", "fastclip"):
        training = Training(workload, mode, batch_size)
        built = held_now()
        for _ in range(WARM_UP):
            training.step()
        costs[mode] = step_cost(training.step)
        costs[mode].total["held"] = most_held(training.step, built)
        del training  # before the next one is built
    base, own = (costs[mode].total for mode in costs)
    ratio = {kind: round(own[kind] / base[kind], 4) for kind in KINDS}
    places = costs["fastclip"].places
    order = sorted(places, key=lambda place: -places[place]["bytes"])
    return {
        "workload": workload,
        "batch_size": batch_size or WORKLOADS[workload].batch_size,
        **{mode: dict(cost.total) for mode, cost in costs.items()},
        "ratio": ratio,
        "places": {place: dict(places[place]) for place in order},
    }


def table(rows: list[dict], *, where: bool) -> str:
    """The table: one line per workload with ratios and operator calls; with `where`, functions too."""
    lines = [f"{'':<16}" + "".join(f"{kind:>13}" for kind in KINDS)]
    for row in rows:
        ratios = "".join(f"{row['ratio'][kind]:>12.2f}x" for kind in KINDS)
        calls = " -> ".join(f"{row[mode]['calls']:,}" for mode in ("non_private", "fastclip"))
        lines.append(f"{row['workload']:<16}{ratios}   calls {calls}")
        for place, found in row["places"].items() if where else ():
            size = f"{found['bytes'] / 2**20:>10.1f} MiB {found['calls']:>6} calls"
            lines.append(f"{size}  {place or 'all others'}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Counts, prints the table and writes the JSON file."""
    parser = argparse.ArgumentParser(prog="python -m bench.cost", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=DEFAULT)
    parser.add_argument("--batch-size", type=int, help="samples per step (default: the workload's)")
    parser.add_argument(
        "--where", action="store_true", help="show the functions that call the operators"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="JSON file to write")
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore")
    rows = [compare(name, options.batch_size) for name in tqdm(options.workloads)]
    result = {**heading("bench.cost", arguments), "rows": rows}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(rows, where=options.where))


if __name__ == "__main__":
    main()

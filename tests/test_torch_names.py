"""Private names of torch and Opacus: each written in one file, and what they are taken for."""

from __future__ import annotations

import ast
import functools
import inspect
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import opacus
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from fastclip.core import compiler, noted, opacus_names, torch_names
from fastclip.distributed.shards import Shards
from tests.refusal import refused


class Owner:
    """Somebody who asks."""


ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "fastclip").rglob("*.py"))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def own_names() -> set[str]:
    """What fastclip's own modules, classes and functions define."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) in ("self", "cls")
            ):
                found.add(node.attr)
    return found


def others(source: str, own: set[str]) -> Iterator[tuple[str, str]]:
    """(name, where it lies) of every private name that is imported, or read of an object."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] != "fastclip":
            module = next((p for p in str(node.module).split(".") if is_private(p)), None)
            for name in [alias.name for alias in node.names if is_private(alias.name)]:
                yield name, str(node.module)
            if module is not None:
                yield module, str(node.module).split(f".{module}")[0]
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield node.attr, ast.unparse(node.value)


def test_they_are_written_in_one_file() -> None:
    """Elsewhere only attributes that the file names, for a reader of it to know of."""
    own, known = own_names(), [*torch_names.ATTRIBUTES.values(), *opacus_names.ATTRIBUTES.values()]
    allowed = {name for names in known for name in names}
    found: dict[str, set[str]] = {}
    for path in SOURCES:
        file = path.relative_to(ROOT / "fastclip").as_posix()
        names = [(name, of) for name, of in others(path.read_text(), own) if name not in allowed]
        # `torch._C._name` is two: the first says it
        found[file] = {f"{of}.{n}" for n, of in names if not any(map(is_private, of.split(".")))}
    for name in ("torch_names.py", "compiler.py", "opacus_names.py"):
        del found[f"core/{name}"]
    assert {file: names for file, names in found.items() if names} == {}


def test_what_is_private_is_seen() -> None:
    source = (
        "from torch._compile import _disable\nfrom torch.data import _Iter\nimport torch\n"
        "torch._C._go()\nx.grad._there\nself._own\nx.__class__\n_ = x\n"
    )
    assert set(others(source, {"_own"})) == {
        ("_compile", "torch"), ("_disable", "torch._compile"), ("_Iter", "torch.data"),
        ("_C", "torch"), ("_go", "torch._C"), ("_there", "x.grad"),
    }  # fmt: skip


OWNERS: dict[str, Any] = {
    "torch.Tensor": torch.ones(1),
    "torch.nn.Module": nn.Module(),
    "torch.nn.Conv2d": nn.Conv2d(1, 1, 1),
    "torch.ops": torch.ops.aten.add.Tensor,
    "sys": sys,
}


@pytest.mark.parametrize("whose", OWNERS)
def test_attributes_exist(whose: str) -> None:
    assert all(hasattr(OWNERS[whose], name) for name in torch_names.ATTRIBUTES[whose])


def test_attributes_of_opacus_objects() -> None:
    """What opacus_names.py finds written in their classes, they have."""
    wrapper = opacus.GradSampleModule(nn.Linear(1, 1))
    inner = torch.optim.SGD(wrapper.parameters(), lr=0.1)
    private = opacus.optimizers.DPOptimizer(
        inner, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=1
    )
    made = {
        opacus.PrivacyEngine: opacus.PrivacyEngine(),
        opacus.optimizers.DPOptimizer: private,
        opacus.grad_sample.AbstractGradSampleModule: wrapper,
        opacus.GradSampleModule: wrapper,
    }
    for kind, names in opacus_names.ATTRIBUTES.items():
        if kind is not opacus.grad_sample.GradSampleModuleFastGradientClipping:
            assert all(hasattr(made.get(kind, kind), name) for name in names), kind


def test_handles_that_opacus_removes() -> None:
    layer = nn.Linear(1, 1)
    wrapper = opacus.GradSampleModule(layer)
    handles = getattr(layer, opacus_names.OPACUS_HOOKS)
    handles.append(layer.register_forward_hook(lambda *_: None))
    wrapper.cleanup()
    assert not layer._forward_hooks


def test_attributes_of_wrappers() -> None:
    layer = nn.Linear(1, 1)
    assert torch.compile(layer)._orig_mod is layer
    assert torch.compiler.disable(lambda: None)._torchdynamo_disable  # type: ignore[attr-defined]
    ghost = opacus.grad_sample.GradSampleModuleFastGradientClipping(layer, max_grad_norm=1.0)
    ghost(torch.ones(2, 1, requires_grad=True)).sum().backward()
    assert ghost.get_norm_sample() is ghost._per_sample_gradient_norms


def test_attributes_of_the_trainer() -> None:
    source = inspect.getsource(pytest.importorskip("transformers").Trainer)
    assert all(f"self.{name}" in source for name in torch_names.ATTRIBUTES["transformers.Trainer"])


def test_attributes_of_lightnings_strategy() -> None:
    strategy = pytest.importorskip("lightning.pytorch.strategies").DDPStrategy()
    assert all(hasattr(strategy, name) for name in torch_names.ATTRIBUTES["lightning.DDPStrategy"])


def test_families_of_modules() -> None:
    kinds = {
        torch_names.BatchNormBase: (
            nn.BatchNorm1d,
            nn.BatchNorm3d,
            nn.SyncBatchNorm,
            nn.LazyBatchNorm2d,
        ),
        torch_names.InstanceNormBase: (nn.InstanceNorm1d, nn.InstanceNorm3d, nn.LazyInstanceNorm2d),
        torch_names.DropoutBase: (
            nn.Dropout,
            nn.Dropout2d,
            nn.AlphaDropout,
            nn.FeatureAlphaDropout,
        ),
    }
    for base, members in kinds.items():
        assert all(issubclass(member, base) for member in members)
    assert nn.Dropout(0.25).p == 0.25


class Noted(torch.autograd.Function):
    """Notes what can be known of the backward pass that runs it."""

    seen: dict[str, Any]

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:  # type: ignore[override]
        Noted.seen = {
            "task": torch_names.current_task(),
            "node": torch_names.current_node(),
            "self": ctx,
        }
        Noted.seen["runs"] = [
            None if node is None else torch_names.will_run(node) for node, _ in ctx.next_functions
        ]
        Noted.seen["ended"] = []
        torch_names.at_end_of_pass(lambda: Noted.seen["ended"].append(torch_names.current_task()))
        assert not Noted.seen["ended"]
        return gradient * 2, None


def test_the_running_pass() -> None:
    x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    assert torch_names.current_task() == -1
    out = Noted.apply(x, weight)
    assert type(out.grad_fn) is torch_names.node_type(Noted)
    out.sum().backward()
    first = Noted.seen
    assert first["task"] >= 0
    assert first["node"] is first["self"]
    assert first["runs"] == [True, True]
    assert len(first["ended"]) == 1
    assert torch_names.current_task() == -1
    Noted.apply(x, weight).sum().backward(inputs=[x])
    assert Noted.seen["runs"] == [True, False]
    assert Noted.seen["task"] != first["task"]


@pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), reason="old"
)
def test_hooks_that_take_what_is_saved() -> None:
    """The innermost ones; those of torch's own contexts say whose they are."""

    def pack(x: Tensor) -> Tensor:
        return x

    assert torch_names.saving_hooks(False) is None
    with torch.autograd.graph.saved_tensors_hooks(pack, pack):
        assert torch_names.saving_hooks(False) == (pack, pack)
        with torch.autograd.graph.save_on_cpu():
            assert torch_names.saving_hooks(False)[0].__module__ == "torch.autograd.graph"
    seen = []
    x = torch.ones(2, requires_grad=True)
    out = checkpoint(
        lambda y: seen.append(torch_names.saving_hooks(False)) or y * y, x, use_reentrant=False
    )
    out.sum().backward()
    assert seen[0][0].__module__ == seen[1][0].__module__ == "torch.utils.checkpoint"
    assert [torch_names.RECOMPUTATION in pack.__qualname__ for pack, _ in seen] == [False, True]


def test_tensors_that_autograd_is_asked_for() -> None:
    """Of these torch does not say whether they are reached."""
    x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"autograd\.grad"):
        torch.autograd.grad(Noted.apply(x, weight).sum(), [x, weight])


def test_calls_of_backward_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors, lists, generators and edges, and of the innermost; other passes are not."""

    def plain(given, seeds=None, *args, **kwargs):  # with other names, as a library's may have
        torch.autograd.graph._engine_run_backward(
            tuple(given), (torch.ones(()),) * 2, False, False, (), allow_unreachable=True,
            accumulate_grad=True,
        )  # fmt: skip

    seen = []
    x = torch.ones((), requires_grad=True)
    y = x * 2
    x.register_hook(lambda _: seen.append(calls.running()))
    calls, model, torchs = torch_names.BackwardCalls(), Owner(), torch.autograd.backward
    calls.watch(model)
    z, edge = y * 3, torch.autograd.graph.get_gradient_edge(y)
    z.backward(retain_graph=True)
    torch.autograd.backward((t for t in (z, y)), retain_graph=True)
    torch.autograd.backward(edge, torch.ones(()), retain_graph=True)
    with pytest.warns(FutureWarning, match="deprecated"):
        torch.autograd.backward([z], grad_variables=[torch.ones(())], retain_graph=True)
    torch.autograd.grad(z, x, retain_graph=True)
    assert [len(call.losses) for call in seen[:4]] == [1, 2, 1, 1]
    assert seen[0].losses[0] is z
    assert seen[2].losses == (edge,)
    assert [call.seeded for call in seen[:4]] == [False, False, True, True]
    assert seen[4] is None
    assert calls.none_runs
    del model
    assert torch.autograd.backward is torchs
    monkeypatch.setattr(torch.autograd, "backward", plain)
    calls.watch(model := Owner())
    torch.autograd.backward([z, y])
    assert seen[5].losses == (z, y)
    del model
    assert torch.autograd.backward is plain


def test_what_losses_hold() -> None:
    scores, labels = torch.randn(3, 2, requires_grad=True), torch.tensor([0, 1, 1])
    codes = []
    for reduction in ("none", "mean", "sum"):
        loss = nn.functional.nll_loss(scores, labels, reduction=reduction, weight=torch.ones(2))
        codes.append(getattr(loss.grad_fn, torch_names.SAVED_REDUCTION))
        assert getattr(loss.grad_fn, torch_names.SAVED_WEIGHT) is not None
    assert codes == [0, 1, 2]


def test_hooks_on_gradients() -> None:
    weight = nn.Parameter(torch.ones(2))
    assert not list(torch_names.gradient_hooks(weight))
    hooks = [lambda g: g, lambda p: None]
    weight.register_hook(hooks[0])
    weight.register_post_accumulate_grad_hook(hooks[1])
    assert list(torch_names.gradient_hooks(weight)) == hooks


def test_versions_of_tensors() -> None:
    x = torch.ones(2)
    before = torch_names.version_of(x)
    x[1:].add_(1)
    assert torch_names.version_of(x) == before + 1


def test_plain_results() -> None:
    class Marked(Tensor):
        __torch_function__ = torch_names.plain_results

    marked = torch.ones(2).as_subclass(Marked)
    assert type(marked) is Marked
    assert {type(x) for x in (marked + 1, marked[0], marked.new_empty(0))} == {Tensor}


def test_tensors_of_a_class() -> None:
    class Kind(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            heard.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    heard: list[Any] = []
    x = torch.ones(2)
    made = torch_names.of_class(Kind, x)
    with torch_names.Native():
        made.mul(2)
    assert not heard
    assert type(made) is Kind
    assert made.is_leaf
    assert made.requires_grad
    assert (
        torch_names.memory_of(made)
        == torch_names.memory_of(x[1:])
        != torch_names.memory_of(x.clone())
    )
    assert heard


def test_operations_say_what_they_change() -> None:
    written = torch.ops.aten.add_.Tensor._schema
    assert written.is_mutable
    assert not torch.ops.aten.add.Tensor._schema.is_mutable
    assert written.name == "aten::add_"
    assert written.arguments[0].alias_info.is_write


def test_transforms_are_known() -> None:
    seen = []
    torch.func.vmap(lambda x: (seen.append(torch_names.transformed()), x)[1])(torch.ones(2))
    torch.func.grad(lambda x: (seen.append(torch_names.transformed()), x)[1])(torch.tensor(1.0))
    assert seen == [True, True]
    assert not torch_names.transformed()


def test_tensors_without_memory_are_known() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert not torch_names.invents()
    with FakeTensorMode():
        assert torch_names.invents()
    with FlopCounterMode(display=False):
        assert not torch_names.invents()


def test_settings_of_products() -> None:
    if torch_names.precision_of is None or torch_names.set_precision is None:
        assert tuple(map(int, torch.__version__.split(".")[:2])) < (2, 9)
        return
    before = torch_names.precision_of("cuda", "matmul")
    try:
        torch_names.set_precision("cuda", "matmul", "tf32")
        assert torch_names.precision_of("cuda", "matmul") == "tf32"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch_names.set_precision("cuda", "matmul", before)


def test_parametrizations_that_are_kept() -> None:
    layer = parametrizations.weight_norm(torch.nn.Linear(3, 3))
    with parametrize.cached():
        kept = layer.weight
        with torch_names.parametrizations_apart():
            assert layer.weight is not kept
            assert layer.weight is layer.weight
        assert layer.weight is kept
    assert layer.weight is not kept


def test_nothing_is_compiled_without_dynamo() -> None:
    calls = []

    @compiler.disable_dynamo
    def plain(x: Tensor) -> Tensor:
        calls.append(torch.compiler.is_compiling())
        return x

    torch.compile(lambda x: plain(x) + 1, backend="eager")(torch.ones(1))
    assert calls == [False]
    assert compiler.can_compile()


@pytest.mark.parametrize("fullgraph", [True, False])
def test_what_was_asked_of_a_compiled_module(fullgraph: bool) -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="eager", fullgraph=fullgraph)
    assert compiler.is_one_graph(compiled) is fullgraph


def test_what_a_compiled_function_was_made_of() -> None:
    def plain(x: Tensor) -> Tensor:
        return x + 1

    compiled = torch.compile(plain, backend="eager")
    assert compiler.as_written(compiled) is plain
    around = functools.wraps(compiled)(lambda x: 2 * compiled(x))
    assert compiler.as_written(around) is around
    method = MethodType(compiled, torch.ones(1))
    assert compiler.as_written(method) == MethodType(plain, method.__self__)
    assert compiler.as_written(method)() == 2


def test_export_is_told() -> None:
    """A branch on it is taken while a program is traced, and not otherwise."""

    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if compiler.is_exporting() else x

    x = torch.zeros(2)
    assert torch.equal(torch.export.export(Branch(), (x,)).module()(x), x + 1)
    assert torch.equal(Branch()(x), x)


@pytest.mark.parametrize("run", range(2))
def test_the_first_square_root_of_a_process_is_exact(run: int) -> None:
    """Computed by several threads it had 11 bits, in one process of four."""
    code = (
        "import torch, fastclip.core.torch_names; torch.set_num_threads(2);"
        "x = torch.full((4484,), 0.3); print(len({*x.sqrt().tolist()}))"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert told.stdout.strip() == "1"


def test_no_ddp_runs() -> None:
    assert torch_names.running_ddp() is None
    assert hasattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module")


@pytest.mark.parametrize("workers", [0, 1])
def test_iterators_of_loaders(workers: int) -> None:
    class Rows:
        asking: Any = None

        def __iter__(self) -> Iterator[list[int]]:
            for i in range(4):
                if threading.current_thread() is threading.main_thread():
                    Rows.asking = calls.innermost()
                yield [i]

    rows: Any = Rows()
    before = torch_names.LoaderIterator._next_index
    calls = noted.Noted(torch_names.LoaderIterator, "_next_index")
    calls.watch(owner := Owner())
    reader = iter(DataLoader(range(4), batch_sampler=rows, num_workers=workers))
    assert isinstance(reader, torch_names.LoaderIterator)
    assert getattr(reader, torch_names.INDEX_SAMPLER) is rows
    next(reader)
    next(reader)
    assert Rows.asking == (reader,)
    assert calls.innermost() is None
    del owner
    assert torch_names.LoaderIterator._next_index is before
    assert getattr(reader, torch_names.YIELDED) == 2
    if workers:
        assert getattr(reader, torch_names.RECEIVED) == 2
        assert getattr(reader, torch_names.SENT) == 4
    assert hasattr(reader, torch_names.SENT) == bool(workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders_that_run(workers: int) -> None:
    """When they draw seeds, numbers of samples, and samples; not between batches."""
    seen = []

    class Rows(torch.utils.data.Sampler):
        def __iter__(self) -> Iterator[int]:
            for i in range(2):
                seen.append(torch_names.loader_runs())
                yield i

    class Drawn(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            if threading.current_thread() is threading.main_thread():
                seen.append(torch_names.loader_runs())
            return func(*args, **(kwargs or {}))

    owner = Owner()
    torch_names.watch_loaders(owner)
    with Drawn():
        reader = iter(DataLoader(range(2), sampler=Rows(), num_workers=workers))
    assert len(seen) > 0
    assert not torch_names.loader_runs()
    next(reader)
    assert all(seen)
    assert not torch_names.loader_runs()


def test_collate_functions_are_called_by_a_fetcher() -> None:
    def collate(items: list[int]) -> tuple[Any, list[int]]:
        return torch_names.fetch_calls.innermost()[1], items

    owner = Owner()
    torch_names.fetch_calls.watch(owner)
    keys, items = next(iter(DataLoader(range(4), 2, collate_fn=collate)))
    assert keys == items == [0, 1]


def test_padding_is_one_function() -> None:
    class Heard(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            heard.append((func, len(args) + len(kwargs or {})))
            return func(*args, **(kwargs or {}))

    heard: list[Any] = []
    sequences = [torch.ones(1), torch.ones(2)]
    with Heard():
        pad_sequence(sequences, batch_first=True)
    assert heard == [(torch_names.pad_sequences, 4)]


def test_modes_hear_of_nothing_inside() -> None:
    class Deaf(torch_names.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            raise AssertionError

    x = torch.ones(2, 2)
    with Deaf(), torch_names.Undispatched():
        assert (x + x).sum() == 8
    assert torch_names.memory_of(x) == torch_names.memory_of(x[1])
    assert torch_names.memory_of(x) != torch_names.memory_of(x.clone())


def test_operators_that_are_given_functions() -> None:
    def run() -> None:
        torch.ops.higher_order.cond(torch.tensor(True), torch.sin, torch.cos, (torch.ones(2),))

    heard: list[Any] = []
    with torch_names.hear_functions_given(heard.append):
        run()
        assert {*map(str, heard)} == {"cond"}
        heard.clear()
        other = threading.Thread(target=run)
        other.start()
        other.join()
    run()
    assert not heard


def test_reentrant_checkpoints_go_through_apply(monkeypatch) -> None:
    monkeypatch.setattr(
        torch_names.CheckpointFunction, "apply", lambda run, state, *args: run(*args) + 1
    )
    assert checkpoint(torch.neg, torch.ones(1), use_reentrant=True) == 0


def test_what_opacus_leaves() -> None:
    layer = nn.Linear(1, 1)
    wrapped = opacus.GradSampleModule(layer)
    wrapped(torch.ones(2, 1, requires_grad=True)).sum().backward()
    assert opacus_names.OPACUS_MARK in layer.weight.__dict__
    assert {"grad_sample", opacus_names.OPACUS_MARK} <= set(
        opacus_names.OPACUS_PARAM_MONKEYPATCH_ATTRS
    )
    assert "grad_sample" in layer.weight.__dict__
    wrapped.cleanup()
    assert opacus_names.OPACUS_MARK not in layer.weight.__dict__


def test_opacus_marks_what_was_clipped() -> None:
    gradient = torch.ones(1)
    opacus_names.check_unprocessed(gradient)
    opacus_names.mark_processed(gradient)
    with pytest.raises(ValueError, match="zero_grad"):
        opacus_names.check_unprocessed(gradient)


def test_nestings() -> None:
    leaves, spec = torch_names.tree_flatten({"a": [1, (2,)]})
    assert leaves == torch_names.tree_leaves({"a": [1, (2,)]}) == [1, 2]
    assert isinstance(spec, torch_names.TreeSpec)
    assert torch_names.tree_unflatten([3, 4], spec) == {"a": [3, (4,)]}
    assert torch_names.tree_map(str, [1]) == ["1"]


def test_whether_results_must_be_the_same_each_time() -> None:
    assert not torch_names.are_deterministic()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch_names.are_deterministic()
    finally:
        torch.use_deterministic_algorithms(False)


def test_modules_at_rest(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fully_shard's hooks cast their inputs as ever, but leave the parameters as they are; before torch
    2.13 they cast nothing, which is refused."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    try:
        net: Any = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for module in (net[0], net):
            fully_shard(module, mp_policy=half)
        x = torch.ones(1, 2)
        state = type(net._get_fsdp_state())
        with monkeypatch.context() as patched:
            patched.delattr(state, "_cast_forward_inputs", raising=False)
            with refused("MixedPrecisionPolicy of fully_shard expects torch 2.13"):
                Shards(net)
        if not hasattr(state, "_cast_forward_inputs"):
            return
        Shards(net)
        net(x)
        assert isinstance(net[0].weight, DTensor)
        for module in (net, net[0]):
            module.unshard()
        whole = net[0].weight
        with torch_names.at_rest([net, net[0]]):
            out = net(x)
            assert out.dtype == torch.bfloat16
            assert net[0].weight is whole
            out.sum().backward()
            assert net[0].weight is whole
            assert whole.grad is not None
        whole.grad = None
        net(x)
        assert isinstance(net[0].weight, DTensor)
    finally:
        distributed.destroy_process_group()


def test_timeouts_of_groups(tmp_path) -> None:
    """A group does not take it over from the one that its processes are in."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1,
        timeout=timedelta(seconds=7),
    )  # fmt: skip
    try:
        assert torch_names.timeout_of(distributed.group.WORLD) == timedelta(seconds=7)
        another = distributed.new_group([0], backend="gloo")
        assert torch_names.timeout_of(another) == timedelta(minutes=30)
    finally:
        distributed.destroy_process_group()


def test_hooks_of_all_modules() -> None:
    """A table for each kind, in which a hook is found under its handle's number."""
    module = torch.nn.modules.module
    found = []
    for register in (
        module.register_module_forward_pre_hook, module.register_module_forward_hook,
        partial(module.register_module_forward_hook, with_kwargs=True, always_call=True),
        module.register_module_full_backward_pre_hook, module.register_module_full_backward_hook,
    ):  # fmt: skip
        handle = register(lambda *args: None)
        found.append([handle.id in table for table in torch_names.hooks_of_all_modules()])
        handle.remove()
    assert [any(kind) for kind in found] == [True] * 5
    assert [any(of_table) for of_table in zip(*found, strict=True)] == [True] * 6


def test_the_end_of_a_pool() -> None:
    """Its name; a build without CUDA has no allocator that could be asked."""
    assert callable(torch_names.end_of_pool)


def test_an_attribute_that_is_heard_has_its_name() -> None:
    """As torch's own has, which it hands to subclasses: fully_shard sets proxies on modules."""

    class Sub(Tensor):
        asked: list[str] = []

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            Sub.asked.append(func.__self__.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    end = torch_names.hear_exports(lambda what, x: None)
    try:
        assert torch.ones(2).as_subclass(Sub).grad_fn is None
    finally:
        end()
    assert Sub.asked == ["grad_fn"]

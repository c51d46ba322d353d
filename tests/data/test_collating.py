"""Privacy depends on collate_fn: each sample is in a batch once, and mixed with no other."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from opacus import data_loader as opacus_loader
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor, nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
)
from torch.utils.data import DataLoader, default_collate

from fastclip import FastPrivacyEngine
from fastclip.core.torch_names import tree_leaves
from fastclip.data.collate import CheckedCollate, checked_collate
from fastclip.errors import BatchSizeError, FastclipError
from tests.data.test_draws import until_the_end

N = 40
ROWS = list(torch.eye(N) * 100)  # views of one memory; sample i's gradient is along axis i
ARRAYS = [row.numpy().copy() for row in ROWS]
KINDS = {"tensors": ROWS, "arrays": ARRAYS}
Pair = namedtuple("Pair", "x y")


@dataclass
class Kept:
    x: Any
    tags: list[str]


def stacked(rows: list[Any]) -> Tensor:
    if not rows:
        return torch.zeros(0, N)
    return torch.stack(rows) if isinstance(rows[0], Tensor) else torch.from_numpy(np.stack(rows))


def as_tensor(row: Any) -> Tensor:
    return row if isinstance(row, Tensor) else torch.tensor(row)


def padded(rows: list[Any]) -> Tensor:
    return pad_sequence([as_tensor(row) for row in rows], batch_first=True)


# Functions that break the law


def half_twice(rows: list[Any]) -> Tensor:
    half = rows[: len(rows) // 2]
    return stacked(half + half)


def resampled(rows: list[Any]) -> Tensor:
    return stacked(random.choices(rows, k=len(rows)))


def resampled_by_numpy(rows: list[Any]) -> Tensor:
    return stacked([rows[i] for i in np.random.randint(0, len(rows), len(rows))])


def resampled_by_torch(rows: list[Any]) -> Tensor:
    return stacked(rows)[torch.randint(len(rows), (len(rows),))]


def resampled_in_secret(rows: list[Any]) -> Tensor:
    return stacked([rows[i] for i in np.random.default_rng().integers(0, len(rows), len(rows))])


def refilled(rows: list[Any]) -> Tensor:
    good = [row for row in rows if row[:20].sum() > 0]
    return stacked((good * len(rows))[: len(rows)]) if good else torch.zeros(len(rows), N)


def mixup(rows: list[Any]) -> Tensor:
    x = stacked(rows)
    return 0.7 * x + 0.3 * x[torch.randperm(len(x))]


def pairs(rows: list[Any]) -> tuple[Tensor, Tensor]:
    """Interleaved halves: each position has two samples."""
    x, half = stacked(rows), len(rows) // 2
    return x[:half], x[half : 2 * half]


def averaged_pairs(rows: list[Any]) -> Tensor:
    x, half = stacked(rows), len(rows) // 2
    return (x[:half] + x[half : 2 * half]) / 2


def centered(rows: list[Any]) -> Tensor:
    x = stacked(rows)
    return x - x.mean(0)


def scaled_by_the_norm(rows: list[Any]) -> Tensor:
    x = stacked(rows)
    return x / x.norm()


def centered_by_python(rows: list[Any]) -> Tensor:
    x = stacked(rows)
    return x - sum(float(row[:20].sum()) for row in rows)


def doubled(rows: list[Any]) -> Tensor:
    return stacked(rows + rows)


def with_the_first(rows: list[Any]) -> tuple[Tensor, Any]:
    return stacked(rows), rows[0]


def rolled_labels(rows: list[Any]) -> dict[str, Tensor]:
    """The label of the next sample."""
    return {"x": stacked(rows), "label": stacked(rows[1:] + rows[:1])}


def a_list_with_one_twice(rows: list[Any]) -> list[Any]:
    return [*rows, rows[0]]


def total(rows: list[Any]) -> Tensor:
    return stacked(rows).sum(0)


FAULTY = {
    f: word
    for word, several in {
        "repeats sample": [
            half_twice, resampled, resampled_by_numpy, resampled_by_torch, doubled, with_the_first,
            a_list_with_one_twice,
        ],
        "mixes samples": [
            mixup, pairs, averaged_pairs, centered, centered_by_python, rolled_labels, total,
            scaled_by_the_norm,
        ],
        "sample": [refilled, resampled_in_secret],
    }.items()
    for f in several
}  # fmt: skip


def batches(collate: Any, data: list[Any], times: int = 20, n: int = 10, **options: Any) -> Any:
    """The function's own batches, and those that are checked."""
    drawn, checked = random.Random(3), CheckedCollate(collate, **options)
    for k in range(times):
        yield checked(drawn.sample(data, 1 if k == 5 else n))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("collate", FAULTY, ids=lambda f: f.__name__)
def test_faults_are_seen_in_the_first_batch(collate: Any, kind: str) -> None:
    random.seed(0)
    with pytest.raises(BatchSizeError) as caught:
        next(batches(collate, KINDS[kind]))
    said = str(caught.value)
    assert said.startswith(f"collate_fn '{collate.__name__}' (test_collating.py:")
    assert FAULTY[collate] in said
    assert len(said.split()) <= 40
    assert said.partition(" See ")[0].count(". ") == 1
    if kind == "tensors" and collate not in (
        with_the_first,
        a_list_with_one_twice,
        centered_by_python,
    ):
        assert " at test_collating.py:" in said  # the operation's own line


def model_of(collate: Any, data: Any, **options: Any) -> tuple[nn.Linear, Any, Any, Any]:
    model = nn.Linear(N, 1, bias=False)
    own = {k: options.pop(k) for k in ("poisson_sampling", "unit_ids") if k in options}
    made = FastPrivacyEngine(accountant="rdp").make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        data_loader=DataLoader(data, batch_size=10, collate_fn=collate, **options),
        noise_multiplier=0.0, max_grad_norm=1.0, loss_reduction="sum", **own,
    )  # fmt: skip
    return model, *made


def most(collate: Any, data: Any, physical: int | None = None, **options: Any) -> float:
    """The most that a sample contributes to a sum, in units of C."""
    model, wrapped, optimizer, loader = model_of(collate, data, **options)
    worst = 0.0

    def train(batches: Any) -> None:
        nonlocal worst
        for x in batches:
            while not isinstance(x, Tensor):
                x = next(iter(x.values() if isinstance(x, dict) else x))
            if len(x):
                optimizer.zero_grad()
                wrapped(x).sum().backward()
                worst = max(worst, float(model.weight.summed_grad.abs().max()))
                optimizer.step()

    for _ in range(2):
        if physical is None:
            train(loader)
        else:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
            ) as parts:
                train(parts)
    return worst


WAYS: dict[str, dict[str, Any]] = {
    "Poisson": {},
    "order": {"poisson_sampling": False},
    "Poisson, workers": {"num_workers": 2},
    "order, workers": {"num_workers": 2, "poisson_sampling": False},
    "physical": {"physical": 4, "poisson_sampling": False},
    "units": {"unit_ids": range(N)},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("collate", [half_twice, resampled, mixup, rolled_labels])
def test_faults_are_seen_in_training(collate: Any, way: str, kind: str) -> None:
    said = ""
    if way == "order, workers":
        loader = model_of(collate, KINDS[kind], **WAYS[way])[3]
        for batch in until_the_end(loader):
            assert isinstance(batch, BatchSizeError)
            said = str(batch)
    else:
        try:
            most(collate, KINDS[kind], **WAYS[way])
        except FastclipError as error:
            said = str(error)
    assert f"collate_fn {'' if way == 'units' else repr(collate.__name__)}" in said
    if way == "units":  # the order is asked for first
        assert "errors.html#privacy-units" in said
    else:
        assert FAULTY[collate] in said


def reversed_rows(rows: list[Any]) -> Tensor:
    return stacked(rows[::-1])


def shuffled(rows: list[Any]) -> Tensor:
    return stacked(random.sample(rows, len(rows)))


def filtered(rows: list[Any]) -> Tensor:
    return stacked([row for row in rows if row[:20].sum() > 0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("collate", [stacked, reversed_rows, shuffled, filtered])
def test_the_bound_holds(collate: Any, way: str, kind: str) -> None:
    if way == "units" and collate is not stacked:
        pytest.skip("units are told by the order")
    assert most(collate, KINDS[kind], **WAYS[way]) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("way", ["Poisson", "order", "Poisson, workers", "units"])
def test_the_default_is_known(way: str) -> None:
    assert most(default_collate, ROWS, **WAYS[way]) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("way", ["Poisson", "order", "units"])
def test_the_default_is_called_as_it_is(way: str) -> None:
    """Neither traced nor compared, whatever a Poisson loader puts around it."""
    collate = model_of(default_collate, ROWS, **WAYS[way])[3].collate_fn
    assert not isinstance(collate, CheckedCollate)
    assert getattr(collate, "checked", default_collate) is default_collate


@pytest.mark.skipif(
    not hasattr(opacus_loader, "CollateFnWithEmpty"), reason="Opacus 1.5.4 has none"
)
def test_what_opacus_puts_around_a_function_changes_nothing() -> None:
    kind = opacus_loader.CollateFnWithEmpty
    around = partial(kind, sample_empty_shapes=[(0, N)], dtypes=[torch.float32])
    known, other = (
        around(f, batch_first=True, rand_on_empty=False) for f in (default_collate, padded)
    )
    assert checked_collate(known) is known
    assert isinstance(checked_collate(other), CheckedCollate)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mlm", [True, False])
def test_collators_of_transformers(mlm: bool, workers: int) -> None:
    """Whatever they draw and however they pad; and a sample that is given to them twice is seen."""
    transformers = pytest.importorskip("transformers")
    tokenizer = tiny_tokenizer(transformers)
    labels, words = random.Random(1), [f"w{k}" for k in range(30)]
    rows = []
    for _ in range(N):
        row = dict(tokenizer(" ".join(labels.choices(words, k=labels.randint(2, 12)))))
        rows.append({**row, "labels": [labels.randint(0, 3) for _ in row["input_ids"]]})
    plain = [{"input_ids": row["input_ids"]} for row in rows]
    tensors = [{"input_ids": torch.tensor(row["input_ids"])} for row in rows]
    single = [{**row, "labels": labels.randint(0, 1)} for row in rows]
    model = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=mlm)
    seeded = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=mlm, seed=3)
    for collate, data in (
        (model, plain), (model, tensors), (seeded, plain),
        (transformers.DataCollatorWithPadding(tokenizer), single),
        (transformers.DataCollatorWithPadding(tokenizer, pad_to_multiple_of=8), single),
        (transformers.DataCollatorForTokenClassification(tokenizer), rows),
        (transformers.default_data_collator, [{"x": row.numpy(), "label": 1} for row in ROWS]),
    ):  # fmt: skip
        if workers:
            own = {"num_workers": workers, "poisson_sampling": False}
            loader = model_of(collate, data, **own)[3]
            assert sum(len(next(iter(batch.values()))) for batch in loader) == N
        else:
            assert sum(1 for _ in batches(collate, data)) == 20
            with pytest.raises(BatchSizeError, match="repeats sample"):
                next(batches(lambda rows, of=collate: of(rows[:5] * 2), data))


def tiny_tokenizer(transformers: Any) -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    special = {
        f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")
    }
    words = [*special.values(), *(f"w{k}" for k in range(30))]
    model = tokenizers.models.WordLevel({w: k for k, w in enumerate(words)}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **special)


# A fault that only some batches have


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_item_is_replaced_by_another(kind: str) -> None:
    """Seen where it happens: batches of tensors are traced; of others, those with rows alike."""

    def replaced(rows: list[Any]) -> Tensor:
        return stacked([rows[0] if bool(row.sum() != row.sum()) else row for row in rows])

    for bad in (6, 17):
        checked, drawn = CheckedCollate(replaced), random.Random(3)
        for k in range(bad + 1):
            rows = drawn.sample(KINDS[kind], 10)
            if k < bad:
                assert torch.equal(checked(rows), stacked(rows))
        rows[4] = rows[4] * float("nan")
        with pytest.raises(BatchSizeError, match=r"repeats (a sample|sample 0) "):
            checked(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_one_sample_fills_a_batch(kind: str) -> None:
    checked = CheckedCollate(lambda rows: stacked((rows * 4)[: max(4, len(rows))]))
    checked(KINDS[kind][:6])
    with pytest.raises(BatchSizeError, match="repeats sample 0"):
        checked(KINDS[kind][:1])


@pytest.mark.parametrize("kind", KINDS)
def test_equal_samples_are_no_copies(kind: str) -> None:
    data = [row * 0 for row in KINDS[kind]]
    for batch in batches(reversed_rows, data):
        assert not batch.any()
    assert most(reversed_rows, data) == 0


def test_copies_of_equal_samples_are() -> None:
    for data in ([row * 0 for row in ROWS], [row * 0 for row in ARRAYS]):
        with pytest.raises(BatchSizeError, match="repeats sample 0"):
            next(batches(half_twice, data))


# Functions that keep the law

torch.manual_seed(0)
NOISE = list(torch.randn(N, 6))
LISTS = [torch.randint(1, 30, (int(n),)).tolist() for n in torch.randint(2, 9, (N,))]
OWN = np.random.default_rng(0)


def masked(rows: list[Any]) -> dict[str, Any]:
    x = padded(rows)
    sizes = [len(row) for row in rows]
    return {
        "x": x, "mask": x != 0, "lengths": torch.tensor(sizes), "longest": max(sizes),
        "as a tensor": torch.tensor(max(sizes)), "task": "a", "rows": [str(len(row)) for row in rows],
    }  # fmt: skip


def into_a_buffer(rows: list[Any]) -> Tensor:
    out = torch.empty(len(rows), max(map(len, rows)), dtype=as_tensor(rows[0]).dtype).fill_(0)
    for i, row in enumerate(rows):
        out[i, : len(row)] = as_tensor(row)
    return out


def into_an_array(rows: list[Any]) -> Tensor:
    out = torch.empty(len(rows), max(map(len, rows)), dtype=as_tensor(rows[0]).dtype)
    view = out.numpy()
    view[:] = 0
    for i, row in enumerate(rows):
        view[i, : len(row)] = np.asarray(row)
    return out


def randomly_masked(rows: list[Any]) -> Tensor:
    x = padded(rows)
    return x.masked_fill(torch.rand(x.shape) < 0.15, 0)


def masked_by_its_own_generator(rows: list[Any]) -> Tensor:
    x = padded(rows)
    return x.masked_fill(torch.from_numpy(OWN.random(x.shape) < 0.15), 0)


def masked_as_items_say(rows: list[Any]) -> Tensor:
    """How many random numbers are drawn follows from the items."""
    return padded(
        [
            torch.tensor([0 if v % 3 and random.random() < 0.15 else v for v in map(int, row)])
            for row in rows
        ]
    )


LAWFUL: list[Callable[[list[Any]], Any]] = [
    padded,
    masked,
    into_a_buffer,
    into_an_array,
    randomly_masked,
    masked_by_its_own_generator,
    masked_as_items_say,
    lambda rows: pad_sequence(
        [as_tensor(row) for row in rows], batch_first=True, padding_side="left"
    ),
    lambda rows: padded(sorted(rows, key=len, reverse=True)),
    lambda rows: padded(sorted(rows, key=lambda row: float(row[0]))),
    lambda rows: padded([row for row in rows if float(row[0]) > 9] or rows),
    lambda rows: pack_sequence([as_tensor(row) for row in rows], enforce_sorted=False),
    lambda rows: pack_padded_sequence(
        padded(rows), torch.tensor([*map(len, rows)]), batch_first=True, enforce_sorted=False
    ),
    lambda rows: [as_tensor(row) for row in rows],
    lambda rows: rows,
    lambda rows: torch.stack([padded(rows), padded(rows) + 1], 1),
    lambda rows: {"a": {"b": [padded(rows), Pair(padded(rows) * 2, (1, 2))]}},
    lambda rows: (padded(rows), [{"boxes": as_tensor(row).view(-1, 1)} for row in rows]),
    lambda rows: Kept(padded(rows), [str(len(row)) for row in rows]),
    lambda rows: (padded(rows), torch.arange(6), "text", None, 3),
    lambda rows: padded([rows[i] for i in torch.randperm(len(rows)).tolist()]),
]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Kept):
        return type(b) is Kept and same(a.x, b.x) and a.tags == b.tags
    if isinstance(a, PackedSequence):
        return same(pad_packed_sequence(a), pad_packed_sequence(b))
    return len(tree_leaves(a)) == len(tree_leaves(b)) and all(
        type(x) is type(y)
        and (torch.equal(x, y) if isinstance(x, Tensor) else np.array_equal(x, y))
        for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True)
    )


@pytest.mark.parametrize("kind", ["tensors", "arrays", "lists"])
@pytest.mark.parametrize("number", range(len(LAWFUL)))
def test_lawful_functions_make_what_they_made(number: int, kind: str) -> None:
    """To the bit, and from the same random numbers."""
    collate = LAWFUL[number]
    data = LISTS if kind == "lists" else [torch.tensor(row) for row in LISTS]
    data = [row.numpy() for row in data] if kind == "arrays" else data  # type: ignore[union-attr]
    drawn, found, state = random.Random(3), [], OWN.bit_generator.state
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    for k in range(20):
        found.append(collate(drawn.sample(data, 1 if k == 5 else 10)))
    OWN.bit_generator.state = state
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    for expected, batch in zip(found, batches(collate, data), strict=True):
        assert same(expected, batch)


@pytest.mark.parametrize("number", range(len(LAWFUL)))
@pytest.mark.parametrize("kind", ["tensors", "lists"])
def test_the_same_functions_of_repeated_items(number: int, kind: str) -> None:
    """Whatever a function does else, a sample that it is given twice by a wrapper is seen."""
    data: list[Any] = LISTS if kind == "lists" else [torch.tensor(row) for row in LISTS]
    with pytest.raises(BatchSizeError, match=r"samples? "):
        for _ in batches(lambda rows: LAWFUL[number](rows[:5] + rows[:5]), data, n=10):
            pass


def test_time_before_batch() -> None:
    def by_time(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        return pad_sequence(rows), torch.tensor([len(row) for row in rows])

    data = [torch.tensor(row) for row in LISTS]
    assert sum(1 for _ in batches(by_time, data, batch_first=False)) == 20
    with pytest.raises(BatchSizeError, match=r"along axis 0.* or pass batch_first=False"):
        next(batches(by_time, data))
    with pytest.raises(BatchSizeError, match="repeats sample"):
        next(batches(lambda rows: by_time(rows[:5] + rows[:5]), data, batch_first=False))


def test_an_order_that_must_be_kept() -> None:
    assert sum(1 for _ in batches(stacked, ROWS, ordered=True)) == 20
    for kind in KINDS.values():
        with pytest.raises(BatchSizeError, match="changes the order of samples"):
            next(batches(reversed_rows, kind, ordered=True))


# What the function sees


def test_items_are_what_they_were() -> None:
    """Types, attributes and gradients stay, and so does the memory that items share."""

    class Tagged(Tensor):
        pass

    big = torch.arange(24.0).view(4, 6)
    items: list[Any] = []
    for i in range(4):
        x = big[i].as_subclass(Tagged)
        x.tag = i
        items.append({"x": x, "w": torch.ones(2, requires_grad=True), "n": Pair(big[i, 1:3], "a")})
    shared = torch.ones(3)

    def look(rows: list[Any]) -> Tensor:
        assert [row["x"].tag for row in rows] == [0, 1, 2, 3]
        assert all(type(row["x"]) is Tagged and type(row["n"]) is Pair for row in rows)
        assert all(row["w"].requires_grad and row["w"].is_leaf for row in rows)
        assert all(row["x"].data_ptr() == big[i].data_ptr() for i, row in enumerate(rows))
        rows[0]["x"].add_(1)
        return torch.stack([row["x"].as_subclass(Tensor) for row in rows])

    assert torch.equal(CheckedCollate(look)(items), big)
    assert big[0, 0] == 1
    mask = [(row, shared) for row in ROWS]  # what all items hold is of no sample
    for _ in batches(lambda rows: (stacked([r[0] for r in rows]), rows[0][1]), mask, times=3):
        pass


def test_a_function_that_knows_its_items_and_notes_its_calls() -> None:
    """Other content may be none that it takes; what it notes is of the calls that were made for it."""

    class Known:
        def __init__(self) -> None:
            self.numbers = {tuple(row): k for k, row in enumerate(LISTS)}
            self.seen: list[int] = []
            self.calls = 0

        def collate(self, rows: list[Any]) -> Tensor:
            self.seen += [self.numbers[tuple(row)] for row in rows]
            self.calls += 1
            return padded(rows)

        def repeat(self, rows: list[Any]) -> Tensor:
            return self.collate(rows[:5] + rows[:5])

    known = Known()
    for k, _ in enumerate(batches(known.collate, LISTS)):
        assert known.calls == k + 1
    assert len(known.seen) == 19 * 10 + 1
    for ordered in (False, True):
        with pytest.raises(BatchSizeError, match="repeats sample 0"):
            next(batches(Known().repeat, LISTS, ordered=ordered))
    assert sum(1 for _ in batches(Known().collate, LISTS, ordered=True)) == 20


def test_errors_of_the_function_are_its_own() -> None:
    def broken(rows: list[Any]) -> Tensor:
        return torch.stack([*rows, torch.zeros(3)])

    calls = []

    def own(rows: list[Any]) -> Tensor:
        calls.append(1)
        raise KeyError("mine")

    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        next(batches(broken, ROWS))
    with pytest.raises(KeyError, match="mine"):
        next(batches(own, ROWS))
    assert len(calls) == 1


def test_it_is_a_stand_in() -> None:
    class Collator:
        length = 7

        def __call__(self, rows: list[Any]) -> Tensor:
            return stacked(rows)

    _, _, _, loader = model_of(Collator(), ROWS, poisson_sampling=False)
    assert loader.collate_fn.length == 7
    with pytest.raises(AttributeError):
        _ = loader.collate_fn.missing
    again = model_of(loader.collate_fn, ROWS, poisson_sampling=False)[3]
    assert isinstance(again.collate_fn, CheckedCollate)
    assert not isinstance(again.collate_fn.collate, CheckedCollate)
    checked = CheckedCollate(stacked)
    checked(ARRAYS[:4])
    import pickle

    assert torch.equal(pickle.loads(pickle.dumps(checked))(ROWS[:3]), stacked(ROWS[:3]))


def test_no_compiler_is_imported() -> None:
    """The first mode of a process could import torch._dynamo, seconds in every worker."""
    code = (
        "import sys, torch; from fastclip.data.collate import CheckedCollate\n"
        "check = CheckedCollate(lambda rows: torch.stack(rows))\n"
        "check(list(torch.eye(3))); CheckedCollate(lambda rows: torch.tensor(rows))([1., 2.])\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=300).returncode == 0

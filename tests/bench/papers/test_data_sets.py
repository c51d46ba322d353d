"""Every data set: tensors that fit each other, parts that are apart, and no look at test rows."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn.linear_model import LogisticRegression

from bench.papers.data import DATA_SETS, gossis, splits
from bench.papers.data.source import SYNTHETIC_NOTE
from tests.bench.papers.folders import CASES, parts_of, replaced

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in DATA_SETS),
    ("adult", {"balanced": True, "validation": 0.1}),
    ("adult", {"protected": True}),
    ("breast-cancer", {"validation": 0.1}),
    ("celeba", {"rows": 8, "size": 16}),
    ("dutch", {"unbalanced": True}),
    ("ham10000", {"validation": 0.1, "size": 8}),
    ("mnist", {"fashion": True, "reduced_class": None}),
    ("mnist", {"reduced_class": 2, "kept": 5}),
]


def _id(value: object) -> str:
    return (
        ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)
    )


def _columns(x: tuple[torch.Tensor, ...]) -> np.ndarray:
    """Inputs as columns; of texts, how often each word number occurs."""
    if x[0].dtype == torch.int64:
        counts = torch.zeros(len(x[0]), 512).scatter_add_(1, x[0] % 512, x[1].float())
        return counts.numpy()
    return x[0].flatten(1).numpy()


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=_id)
def test_parts(name: str, options: dict[str, Any], folders, monkeypatch) -> None:
    seen = []
    record = splits.record
    monkeypatch.setattr(
        splits, "record", lambda parts, seed: seen.append(parts) or record(parts, seed)
    )
    data = DATA_SETS[name].load(folders.get(name), **options)
    parts = parts_of(data)
    for rows in parts.values():
        assert len(rows) > 0
        assert all(len(tensor) == len(rows) for tensor in (*rows.x, *rows.groups.values()))
        assert all(not tensor.is_floating_point() or tensor.isfinite().all() for tensor in rows.x)
        assert rows.x[0].shape[1:] == data.train.x[0].shape[1:]
        assert rows.y.dtype == torch.int64
        assert set(rows.y.tolist()) <= set(range(len(data.classes)))
        assert set(rows.groups) == set(data.attributes)
        for attribute, group in rows.groups.items():
            assert group.dtype == torch.int64
            assert set(group.tolist()) <= set(range(len(data.attributes[attribute])))
    assert set(data.train.y.tolist()) == set(range(len(data.classes)))
    assert all(len(set(group.tolist())) > 1 for group in data.train.groups.values())

    (numbers,) = seen  # of the rows, by part
    assert set(numbers) == set(parts)
    together = np.concatenate(list(numbers.values()))
    assert len(np.unique(together)) == len(together)
    assert data.split == {
        "seed": 0,
        "rows": {part: len(rows) for part, rows in parts.items()},
        "sha256": {part: splits.fingerprint(numbers[part]) for part in parts},
    }
    assert data.synthetic == (name in CASES)
    assert (SYNTHETIC_NOTE in data.notes) == data.synthetic


@pytest.mark.parametrize("name", DATA_SETS)
def test_the_same_twice_and_otherwise_with_another_seed(name: str, folders) -> None:
    module = DATA_SETS[name]
    first, second, other = (module.load(folders.get(name), seed=seed) for seed in (3, 3, 4))
    assert first.split == second.split
    assert all(torch.equal(*pair) for pair in zip(first.train.x, second.train.x, strict=True))
    assert torch.equal(first.test.y, second.test.y)
    published = name == "celeba"  # its parts are not drawn
    assert (first.split["sha256"] == other.split["sha256"]) == published


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", DATA_SETS)
def test_classes_can_be_learnt(name: str, folders) -> None:
    data = DATA_SETS[name].load(folders.get(name))
    model = LogisticRegression(max_iter=300).fit(_columns(data.train.x), data.train.y.numpy())
    found = model.score(_columns(data.test.x), data.test.y.numpy())
    most_frequent = data.test.y.bincount().max().item() / len(data.test)
    assert found > most_frequent + 0.1


def _brighter(path: Path) -> None:
    Image.new("RGB", (89, 109), (250, 250, 250)).save(path)


def _other_pixel(path: Path) -> None:
    content = bytearray(gzip.decompress(path.read_bytes()))
    content[16 + 400] ^= 0x7F  # of the first image
    path.write_bytes(gzip.compress(bytes(content)))


ONE_ROW = {
    "celeba": lambda folder: _brighter(folder / "img_align_celeba/000001.jpg"),
    "ham10000": lambda folder: _brighter(folder / "HAM10000_images_part_1/ISIC_0000000.jpg"),
    "mimic": lambda folder: replaced(
        folder / "NOTEEVENTS.csv.gz", "Admitted with", "Extreme 999999"
    ),
    "mnist": lambda folder: _other_pixel(folder / "t10k-images-idx3-ubyte.gz"),
}
"""Changes of the inputs of one row."""


@pytest.mark.parametrize("name", ONE_ROW)
def test_a_row_that_changes_leaves_all_others_as_they_are(name: str, folders, copy) -> None:
    before = parts_of(DATA_SETS[name].load(folders[name]))
    folder = copy(name)
    ONE_ROW[name](folder)
    after = parts_of(DATA_SETS[name].load(folder))
    differ = sum(
        int((rows.x[0] != after[part].x[0]).flatten(1).any(1).sum())
        for part, rows in before.items()
    )
    assert differ == 1


@pytest.mark.parametrize("name", ["adult", "dutch"])
def test_encoding_looks_at_no_row(name: str, folders, copy) -> None:
    """With half of the rows gone, those that stay have the same inputs: domains are written down."""
    folder = copy(name)
    for file in CASES[name].files:
        lines = (folder / file).read_text().splitlines(keepends=True)
        (folder / file).write_text("".join(lines[: len(lines) // 2]))
    whole, half = (parts_of(DATA_SETS[name].load(at)) for at in (folders[name], folder))
    known = {row.numpy().tobytes() for rows in whole.values() for row in rows.x[0]}
    assert {row.numpy().tobytes() for rows in half.values() for row in rows.x[0]} <= known


def test_ranges_of_gossis_are_those_of_the_training_rows(folders, copy, monkeypatch) -> None:
    seen = []
    fitted = gossis.fitted
    monkeypatch.setattr(gossis, "fitted", lambda frame: seen.append(frame) or fitted(frame))
    before = gossis.load(folders["gossis"])
    folder = copy("gossis")
    path = folder / f"{gossis.READY}.gz"
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    assert set(seen[0].columns).isdisjoint({"age", "gender", *gossis.LEFT_OUT})
    others = ~table.index.isin(seen[0].index) & (table["d1_lactate_avg"] != "NA")
    table.loc[others, "d1_heartrate_avg"] = "1000000"
    table.loc[others, "group"] = "Unheard of"
    table.to_csv(path, index=False)
    after = gossis.load(folder)
    assert torch.equal(before.train.x[0], after.train.x[0])
    assert not torch.equal(before.test.x[0], after.test.x[0])
    assert after.test.x[0].max() == 1  # clamped

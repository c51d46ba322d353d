"""MNIST (LeCun et al. 1998) and Fashion-MNIST (Xiao et al. 2017), one class made rare for training.

Xu et al. 2020 keep 500 training images of class 8, Esipova et al. 2023 keep 9%, Zhao et al. 2025 10%;
the test part keeps all ten classes as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.papers.data.dataset import Dataset
from bench.papers.data.encoding import words
from bench.papers.data.idx import IMAGES, LABELS, read_idx, write_idx
from bench.papers.data.source import Source, check_count, check_md5, held, is_synthetic, new_folder
from bench.papers.data.splits import assembled, shares_of, split, with_fewer
from fastclip.errors import ArgumentError

TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
COUNTS = {"train": 60_000, "t10k": 10_000}
SIDE = 28
PUT = "the four files train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and \
t10k-labels-idx1-ubyte (.gz or not; the two of t10k alone will do for a smaller experiment)"


@dataclass(frozen=True)
class Kind:
    """One of the two data sets: its name, source, classes, and MD5 sums of its .gz files."""

    name: str
    source: Source
    classes: tuple[str, ...]
    md5: tuple[str, str, str, str]


MNIST = Kind(
    "mnist",
    Source("MNIST", "http://yann.lecun.com/exdb/mnist, LeCun et al. 1998", "CC BY-SA 3.0", PUT),
    words("0 1 2 3 4 5 6 7 8 9"),
    (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
)
FASHION = Kind(
    "fashion-mnist",
    Source("Fashion-MNIST", "https://github.com/zalandoresearch/fashion-mnist", "MIT", PUT),
    words("T-shirt/top Trouser Pullover Dress Coat Sandal Shirt Sneaker Bag Ankle-boot"),
    (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
)


def load(
    folder: Path | None,
    *,
    seed: int = 0,
    fashion: bool = False,
    reduced_class: int | None = 8,
    kept: float = 0.09,
) -> Dataset:
    """The published training and test parts, or a split of the published test part alone.

    Args:
        folder: has the idx files; with only those of t10k, 80% of them train and 20% test.
        seed: of the draws of rows.
        reduced_class: the class of which few training rows are kept; None: all keep theirs.
        kept: how many: a float is a share of the class' training rows, an integer a number.

    Returns:
        Inputs float32 [n, 1, 28, 28] in [-1, 1]; attribute "class". In the split's record the training
        file's rows come first, then the test file's.

    Raises:
        ArgumentError: files are missing, damaged, or not the published ones; or `reduced_class` or
            `kept` is out of range.
    """
    if reduced_class is not None and reduced_class not in range(10):
        raise ArgumentError(f"reduced_class={reduced_class} is not one of the classes 0 to 9")
    kind, synthetic = (FASHION if fashion else MNIST), is_synthetic(folder)
    test = _read(kind, folder, TEST, synthetic)
    notes = []
    if all(held(folder, *_names(name)) is None for name in TRAIN):
        images, labels = test
        parts = split(np.arange(len(labels)), shares_of(0.2), seed=seed, strata=labels)
        notes.append(
            f"{len(parts['train']):,} training and {len(parts['test']):,} test rows, both from the "
            "published test part, are fewer than the papers' 60,000 and 10,000"
        )
    else:
        train = _read(kind, folder, TRAIN, synthetic)
        images, labels = (np.concatenate(pair) for pair in zip(train, test, strict=True))
        cut = len(train[1])
        parts = {"train": np.arange(cut), "test": np.arange(cut, len(labels))}
    if reduced_class is not None:
        parts["train"] = with_fewer(parts["train"], labels, reduced_class, kept, seed=seed)
        count = int((labels[parts["train"]] == reduced_class).sum())
        notes.append(f"class {reduced_class} keeps {count:,} of its training rows")
    y = torch.from_numpy(labels.astype(np.int64))
    return assembled(
        kind.name,
        (scaled(images),),
        y,
        {"class": y},
        parts,
        seed=seed,
        classes=kind.classes,
        attributes={"class": kind.classes},
        synthetic=synthetic,
        notes=notes,
    )


def scaled(images: np.ndarray) -> Tensor:
    """Bytes [n, h, w] from 0 to 255 as float32 [n, 1, h, w] from -1 to 1."""
    return (torch.from_numpy(images[:, None].astype(np.float32)) / 255 - 0.5) / 0.5


def _names(name: str) -> tuple[str, str]:
    return f"{name}.gz", name


def _read(
    kind: Kind, folder: Path | None, names: tuple[str, str], synthetic: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Images, uint8 [n, 28, 28], and labels, uint8 [n], of one part."""
    paths = [kind.source.find(folder, *_names(name)) for name in names]
    if not synthetic:
        for name, path in zip(names, paths, strict=True):
            if path.suffix == ".gz":  # sums are published of these alone
                check_md5(path, kind.md5[(TRAIN + TEST).index(name)])
    images, labels = read_idx(paths[0], IMAGES), read_idx(paths[1], LABELS)
    if images.shape[1:] != (SIDE, SIDE):
        size = " x ".join(map(str, images.shape[1:]))
        raise ArgumentError(f"{paths[0]}: expected images of 28 x 28 pixels, came {size}")
    if len(images) != len(labels):
        raise ArgumentError(
            f"{paths[0]} has {len(images):,} images, but {paths[1].name} {len(labels):,} labels: "
            "they belong to different parts; get both again"
        )
    if labels.max(initial=0) > 9:
        raise ArgumentError(f"{paths[1]} has the label {labels.max()}, expected 0 to 9")
    if not synthetic:
        check_count(str(paths[1]), len(labels), COUNTS[names[0].split("-")[0]])
    return images, labels


def generate(folder: Path, *, rows: int = 600, seed: int = 0) -> None:
    """Write the four files: `rows` images for training, a quarter as many for testing.

    Each class is a pattern of its own, dimmed at random and under noise; the classes are equally many.
    """
    folder = new_folder(folder, "MNIST")
    random = np.random.RandomState(seed)
    patterns = np.kron(random.rand(10, 7, 7) > 0.5, np.ones((4, 4)))  # [10, 28, 28]
    for names, count in ((TRAIN, rows), (TEST, rows // 4)):
        labels = random.permutation(np.arange(count) % 10)
        dimmed = patterns[labels] * random.uniform(60, 200, (count, 1, 1))
        images = np.clip(dimmed + random.normal(0, 40, (count, SIDE, SIDE)), 0, 255)
        for name, values in zip(names, (images, labels), strict=True):
            write_idx(folder / f"{name}.gz", values)

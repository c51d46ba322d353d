"""HAM10000 (Tschandl et al. 2018): seven kinds of pigmented skin lesions, very unequally many."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from bench.papers.data.dataset import Dataset
from bench.papers.data.encoding import codes_of, words
from bench.papers.data.images import listed, read_images, write_image
from bench.papers.data.source import Source, check_count, is_synthetic, new_folder
from bench.papers.data.splits import assembled, shares_of, split
from bench.papers.data.table import read_table
from fastclip.errors import ArgumentError

FILES = ("HAM10000_metadata.csv", "HAM10000_metadata")
"""As most copies call it, and as the Dataverse does."""
FOLDERS = ("HAM10000_images_part_1", "HAM10000_images_part_2", "HAM10000_images", ".")
SOURCE = Source(
    "HAM10000",
    "the Harvard Dataverse, https://doi.org/10.7910/DVN/DBW86T",
    "CC BY-NC 4.0",
    f"{FILES[0]} and the jpg files, in {FOLDERS[0]} and {FOLDERS[1]} or in {FOLDERS[2]},",
)
COUNT = 10_015
NAMES = words("lesion_id image_id dx dx_type age sex localization")
CLASSES = words("akiec bcc bkl df mel nv vasc")
SEXES = ("female", "male", "unknown")


def load(folder: Path | None, *, seed: int = 0, size: int = 32, validation: float = 0.0) -> Dataset:
    """80% of the lesions to train and 20% to test, of each class.

    Args:
        folder: has the table and the pictures.
        seed: of the split.
        size: pictures are resized to size x size.
        validation: share of a validation part, taken from the training part.

    Returns:
        Inputs float32 [n, 3, size, size] in [-1, 1]; attributes "class" and "sex".

    Raises:
        ArgumentError: files or pictures are missing, damaged, or not the published ones.
    """
    shares = shares_of(0.2, validation)
    path, synthetic = SOURCE.find(folder, *FILES), is_synthetic(folder)
    table = read_table(path, NAMES)
    if not synthetic:
        check_count(str(path), len(table), COUNT)
    y = codes_of(table["dx"], CLASSES, path)
    sex = codes_of(table["sex"].replace("", "unknown"), SEXES, path)
    found = listed([path.parent / name for name in FOLDERS])
    names = [f"{image}.jpg" for image in table["image_id"]]
    missing = [name for name in names if name not in found]
    if missing:
        raise ArgumentError(
            f"{SOURCE.title}: {len(missing):,} of {len(names):,} pictures are not in {path.parent}, the "
            f"first of them {missing[0]}; {SOURCE.way_out}"
        )
    parts = split(
        np.arange(len(table)),
        shares,
        seed=seed,
        strata=y.numpy(),
        units=table["lesion_id"].to_numpy(str),
    )
    return assembled(
        "ham10000",
        (read_images([found[name] for name in names], size),),
        y,
        {"class": y, "sex": sex},
        parts,
        seed=seed,
        classes=CLASSES,
        attributes={"class": CLASSES, "sex": SEXES},
        synthetic=synthetic,
        notes=["split by lesion: all pictures of a lesion are in one part"],
    )


def generate(folder: Path, *, rows: int = 210, seed: int = 0) -> None:
    """Write the table and small jpg files in two folders; each class has its colour, most are nv."""
    folder = new_folder(folder, SOURCE.title)
    random = np.random.RandomState(seed)
    lesions = np.unique(random.randint(0, max(1, rows * 3 // 4), rows), return_inverse=True)[1]
    lesions = np.sort(lesions)  # some have several pictures
    kinds = random.choice(len(CLASSES), rows, p=[0.1, 0.1, 0.15, 0.05, 0.15, 0.4, 0.05])
    kinds[: len(CLASSES)] = range(len(CLASSES))  # each occurs
    kinds = kinds[lesions]
    table = pd.DataFrame(
        {
            "lesion_id": [f"HAM_{lesion:07d}" for lesion in lesions],
            "image_id": [f"ISIC_{number:07d}" for number in range(rows)],
            "dx": np.array(CLASSES)[kinds],
            "dx_type": "histo",
            "age": np.where(random.rand(rows) < 0.05, "", random.randint(1, 18, rows) * 5),
            "sex": random.choice(SEXES, rows, p=[0.45, 0.5, 0.05]),
            "localization": "back",
        }
    )
    table.to_csv(folder / FILES[0], index=False)
    colours = random.uniform(60, 200, (len(CLASSES), 3))
    for name in FOLDERS[:2]:
        (folder / name).mkdir(exist_ok=True)
    for row, (image, kind) in enumerate(zip(table["image_id"], kinds, strict=True)):
        pixels = np.clip(random.normal(colours[kind], 30, (45, 60, 3)), 0, 255).astype(np.uint8)
        write_image(folder / FOLDERS[2 * row // rows] / f"{image}.jpg", pixels)

"""CelebA (Liu et al. 2015): is the face a man's? Groups by eyeglasses, as in Esipova et al. 2023."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from bench.papers.data.dataset import Dataset
from bench.papers.data.encoding import codes_of, words
from bench.papers.data.images import listed, read_images, write_image
from bench.papers.data.reading import opened, reading
from bench.papers.data.source import Source, check_count, is_synthetic, new_folder
from bench.papers.data.splits import assembled
from bench.papers.data.table import read_table
from fastclip.errors import ArgumentError

ATTRIBUTE_FILE, PARTITION_FILE = "list_attr_celeba.txt", "list_eval_partition.txt"
FOLDER = "img_align_celeba"
SOURCE = Source(
    "CelebA",
    "the Multimedia Laboratory of the Chinese University of Hong Kong, "
    "https://mmlab.ie.cuhk.edu.hk/projects/CelebA.html, https://doi.org/10.1109/ICCV.2015.425",
    "non-commercial research only",
    f"{ATTRIBUTE_FILE}, {PARTITION_FILE} and the folder {FOLDER} of jpg files",
)
COUNT = 202_599
LABEL, PROTECTED = "Male", "Eyeglasses"
NAMES = words(
    "5_o_Clock_Shadow Arched_Eyebrows Attractive Bags_Under_Eyes Bald Bangs Big_Lips Big_Nose "
    "Black_Hair Blond_Hair Blurry Brown_Hair Bushy_Eyebrows Chubby Double_Chin Eyeglasses Goatee "
    "Gray_Hair Heavy_Makeup High_Cheekbones Male Mouth_Slightly_Open Mustache Narrow_Eyes No_Beard "
    "Oval_Face Pale_Skin Pointy_Nose Receding_Hairline Rosy_Cheeks Sideburns Smiling Straight_Hair "
    "Wavy_Hair Wearing_Earrings Wearing_Hat Wearing_Lipstick Wearing_Necklace Wearing_Necktie Young"
)
PARTS = ("train", "validation", "test")
"""What 0, 1 and 2 mean in the partition file."""
CLASSES = ("not male", "male")
ATTRIBUTES = {"eyeglasses": ("without eyeglasses", "with eyeglasses")}


def load(folder: Path | None, *, seed: int = 0, size: int = 64, rows: int | None = None) -> Dataset:
    """The published parts, or the first rows of each.

    Args:
        folder: has the two lists and the pictures.
        seed: not used, as the parts are published; it is written into the record.
        size: pictures are resized to size x size.
        rows: of each part at most so many, the first of the list: all pictures take 10 GB at size 64.

    Returns:
        Inputs float32 [n, 3, size, size] in [-1, 1]; attribute "eyeglasses".

    Raises:
        ArgumentError: files or pictures are missing, damaged, or not the published ones.
    """
    synthetic = is_synthetic(folder)
    path = SOURCE.find(folder, ATTRIBUTE_FILE)
    partition = SOURCE.find(folder, PARTITION_FILE)
    table = _attributes(path)
    published = read_table(partition, ("file", "part"), names=("file", "part"), separator=" ")
    if not synthetic:
        check_count(str(path), len(table), COUNT)
    if list(table["file"]) != list(published["file"]):
        raise ArgumentError(
            f"{path} and {partition.name} list different pictures: they are from different versions; "
            "get both again"
        )
    part = codes_of(published["part"], ("0", "1", "2"), partition).numpy()
    parts = {name: np.flatnonzero(part == code)[:rows] for code, name in enumerate(PARTS)}
    taken = np.sort(np.concatenate(list(parts.values())))
    paths = _pictures(path.parent, list(table["file"].iloc[taken]))
    codes = {name: codes_of(table[name], ("-1", "1"), path)[taken] for name in (LABEL, PROTECTED)}
    return assembled(
        "celeba",
        (read_images(paths, size),),
        codes[LABEL],
        {"eyeglasses": codes[PROTECTED]},
        {name: np.searchsorted(taken, numbers) for name, numbers in parts.items()},
        seed=seed,
        classes=CLASSES,
        attributes=ATTRIBUTES,
        synthetic=synthetic,
        notes=[] if rows is None else [f"the first {rows:,} pictures of each part at most"],
        recorded=parts,
    )


def _attributes(path: Path) -> pd.DataFrame:
    """Names of the pictures and -1 or 1 for each attribute, as text."""
    with reading(path), opened(path) as file:
        count = file.readline().decode("utf-8").strip()
        names = tuple(file.readline().decode("utf-8").split())
    if names != NAMES:
        raise ArgumentError(
            f"{path}: expected the names of the 40 attributes in its second line, {NAMES[0]} to "
            f"{NAMES[-1]}, came {len(names)} others; get it again"
        )
    table = read_table(path, ("file", *NAMES), names=("file", *NAMES), skip=2, separator=" ")
    if count != str(len(table)):
        raise ArgumentError(
            f"{path}: its first line says {count} pictures, but {len(table)} follow: it was cut off; "
            "get it again"
        )
    return table


def _pictures(folder: Path, names: Sequence[str]) -> list[Path]:
    found = listed([folder / FOLDER])
    missing = [name for name in names if name not in found]
    if missing:
        raise ArgumentError(
            f"{SOURCE.title}: {len(missing):,} of {len(names):,} pictures are not in "
            f"{folder / FOLDER}, the first of them {missing[0]}; {SOURCE.way_out}"
        )
    return [found[name] for name in names]


def generate(folder: Path, *, rows: int = 60, seed: int = 0) -> None:
    """Write both lists and small jpg files; men's are darker, eyeglasses a dark bar across."""
    folder = new_folder(folder, SOURCE.title)
    random = np.random.RandomState(seed)
    table = pd.DataFrame(np.where(random.rand(rows, len(NAMES)) < 0.5, 1, -1), columns=list(NAMES))
    table[PROTECTED] = np.where(random.rand(rows) < 0.2, 1, -1)
    files = [f"{number:06d}.jpg" for number in range(1, rows + 1)]
    (folder / FOLDER).mkdir(exist_ok=True)
    for file, male, glasses in zip(files, table[LABEL], table[PROTECTED], strict=True):
        pixels = random.normal(110 if male == 1 else 160, 25, (109, 89, 3))
        if glasses == 1:
            pixels[45:55] = 20
        write_image(folder / FOLDER / file, np.clip(pixels, 0, 255).astype(np.uint8))
    lines = [
        f"{file} " + " ".join(f"{value:2d}" for value in row)
        for file, row in zip(files, table.to_numpy(), strict=True)
    ]
    (folder / ATTRIBUTE_FILE).write_text("\n".join([str(rows), " ".join(NAMES) + " ", *lines, ""]))
    part = np.searchsorted([0.7, 0.8], (np.arange(rows) + 0.5) / rows)
    pairs = [f"{file} {code}" for file, code in zip(files, part, strict=True)]
    (folder / PARTITION_FILE).write_text("\n".join([*pairs, ""]))

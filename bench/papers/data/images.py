"""Pictures of a folder as tensors, read with Pillow if it is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fastclip.errors import ArgumentError


def read_images(paths: Sequence[Path], size: int) -> Tensor:
    """Pictures, resized to size x size: float32 [n, 3, size, size] in [-1, 1].

    Raises:
        ArgumentError: Pillow is missing, or a file is no whole picture.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise ArgumentError(
            "pictures are read with Pillow, which is not installed: pip install pillow"
        ) from error
    images = torch.empty(len(paths), 3, size, size, dtype=torch.float32)
    for into, path in zip(images, paths, strict=True):
        try:
            with Image.open(path) as picture:
                small = picture.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
        except (OSError, SyntaxError) as error:  # Pillow's errors for what it cannot read
            raise ArgumentError(
                f"{path} is not a whole picture ({error}): it was cut off or damaged; get it again"
            ) from error
        pixels = torch.from_numpy(np.array(small, dtype=np.float32)).permute(2, 0, 1)  # [3, h, w]
        into.copy_((pixels / 255 - 0.5) / 0.5)
    return images


def write_image(path: Path, pixels: np.ndarray) -> None:
    """Write uint8 pixels [h, w, 3] as a jpg."""
    from PIL import Image

    Image.fromarray(pixels).save(path, quality=90)


def listed(folders: Sequence[Path]) -> Mapping[str, Path]:
    """The files of folders by name; of one name in two, the first."""
    found: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            found.setdefault(path.name, path)
    return found

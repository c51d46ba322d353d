"""Discharge summaries as inputs: without what gives the discharge away, and as numbers."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

HEADER = re.compile(
    r"(?:^[ \t]*|[ \t]{2,})(?!(?:Sig|Disp|Refills)\b)([A-Z][A-Za-z /&'()-]{1,60}):", re.MULTILINE
)
"""The header of a section: at the start of a line, or set apart by spaces; no word of a prescription."""
TELLING = ("home", "discharge")
"""Sections whose header has one of these words are removed (Soleymani et al., appendix A.1)."""
WORD = re.compile(r"[a-z]+|[0-9]+")
LENGTH, VOCABULARY = 512, 30_000
PADDING, RESERVED = 0, 1


def without_telling_sections(text: str) -> str:
    """The note without the sections that can tell when and how the patient left."""
    headers = list(HEADER.finditer(text))
    ends = [header.start() for header in headers[1:]] + [len(text)]
    if not headers:
        return text.strip()
    kept = [text[: headers[0].start()]]
    for header, end in zip(headers, ends, strict=True):
        if not any(word in header.group(1).lower() for word in TELLING):
            kept.append(text[header.start() : end])
    return "\n".join(section.strip() for section in kept).strip()


def hashed(
    texts: Sequence[str], length: int = LENGTH, vocabulary: int = VOCABULARY
) -> tuple[Tensor, Tensor]:
    """Each word's CRC-32 as its number: a tokenizer that needs no file and looks at no other row.

    Args:
        texts: n texts.
        length: words of each that are kept, t.
        vocabulary: numbers that there are; 0 pads.

    Returns:
        Numbers, int64 [n, t], and whether they are words, bool [n, t].
    """
    ids = np.full((len(texts), length), PADDING, dtype=np.int64)
    for row, text in zip(ids, texts, strict=True):
        for place, word in enumerate(WORD.findall(text.lower())[:length]):
            row[place] = RESERVED + zlib.crc32(word.encode()) % (vocabulary - RESERVED)
    numbers = torch.from_numpy(ids)
    return numbers, numbers != PADDING

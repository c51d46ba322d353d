"""Two real data sets that need no download: handwritten digits, and Python's own library.

Index letters: n sample, t token position.
"""

from __future__ import annotations

import ast
import re
import sysconfig
import zlib
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import TensorDataset

PACKAGES = ("asyncio", "email", "importlib", "logging", "multiprocessing", "unittest", "xml")
TOKENS = 64
VOCABULARY = 2048
PADDING = 0
WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[0-9]+")  # splits snake_case and camelCase


def digits() -> tuple[TensorDataset, TensorDataset, list[str]]:
    """scikit-learn's digits: 1,797 gray images of 8x8 pixels, ten classes.

    Returns:
        Training set and test set of (float32 [1, 8, 8], int64 []), and the class names.
    """
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1  # in [-1, 1]
    train, test = _split(x, torch.tensor(labels))
    return train, test, [str(digit) for digit in range(10)]


def functions() -> tuple[TensorDataset, TensorDataset, list[str]]:
    """Functions of Python's standard library, to be classified by the package they come from.

    A sample is one function or method: name, docstring and code, cut after `TOKENS` words.
    Packages that this Python lacks are left out.

    Returns:
        Training set and test set of (int64 [t], int64 []), and the class names.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    names = [name for name in PACKAGES if (library / name / "__init__.py").exists()]
    samples, labels = [], []
    for label, name in enumerate(names):
        texts = sorted(_functions_of(library / name))
        samples += [tokenize(text) for text in texts]
        labels += [label] * len(texts)
    train, test = _split(torch.tensor(samples), torch.tensor(labels))
    return train, test, names


def tokenize(text: str) -> list[int]:
    """The first `TOKENS` words of `text`, each hashed into 1..VOCABULARY-1, padded with 0."""
    words = WORD.findall(text)[:TOKENS]
    numbers = [1 + zlib.crc32(word.lower().encode()) % (VOCABULARY - 1) for word in words]
    return numbers + [PADDING] * (TOKENS - len(numbers))


def _functions_of(package: Path) -> set[str]:
    """The source text of every function and method in a package, duplicates removed."""
    texts = set()
    for path in package.rglob("*.py"):
        if {"test", "tests", "__pycache__"} & set(path.relative_to(package).parts):
            continue
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                if len(WORD.findall(text)) >= 12:
                    texts.add(text)
    return texts


def _split(x: torch.Tensor, y: torch.Tensor) -> tuple[TensorDataset, TensorDataset]:
    """Four fifths for training, one fifth for testing, stratified by label, always the same split."""
    train, test = train_test_split(range(len(y)), test_size=0.2, random_state=0, stratify=y)
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])

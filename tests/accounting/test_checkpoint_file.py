"""Checkpoints on disk: no code in them, every byte checked, and those of before still load."""

from __future__ import annotations

import argparse
import io
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine, clipping
from fastclip.accounting.checkpoint import FORMAT, KEY, read_checkpoint
from fastclip.errors import ArgumentError
from tests.accounting.test_engine_ledger import history, start, walk
from tests.strategies import PRESETS


def test_a_checkpoint_of_the_first_format_loads() -> None:
    """Written before there were stamps and digests; its four steps count."""
    engine = FastPrivacyEngine()
    model = nn.Linear(2, 1)
    private, optimizer, _ = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        data_loader=DataLoader(TensorDataset(torch.randn(16, 2)), batch_size=4),
        noise_multiplier=1.0, max_grad_norm=1.0, clipping=clipping.adaptive(),
    )  # fmt: skip
    rest = engine.load_checkpoint(
        path=Path(__file__).with_name("first_format.pt"), module=private, optimizer=optimizer
    )
    assert engine.accountant.history == [(1.0, 0.25, 4)]
    assert round(float(optimizer.grad_state.clipping.next.threshold), 4) == 9.2735
    assert KEY not in rest


@pytest.mark.parametrize("name", PRESETS)
def test_nothing_but_tensors_and_plain_values(name: str, tmp_path: Path) -> None:
    engine = FastPrivacyEngine()
    model = nn.Linear(6, 4)
    private, optimizer, _ = engine.make_private(
        module=model, optimizer=torch.optim.Adam(model.parameters()),
        data_loader=DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=6),
        noise_multiplier=2.0, max_grad_norm=1.0, clipping=PRESETS[name],
    )  # fmt: skip
    engine.save_checkpoint(path=tmp_path / "run.pt", module=private, optimizer=optimizer)
    found = torch.load(tmp_path / "run.pt", weights_only=True)
    assert found[KEY]["format"] == FORMAT
    engine.load_checkpoint(path=tmp_path / "run.pt", module=private, optimizer=optimizer)


def test_no_flipped_bit_of_the_directory_is_loaded(tmp_path: Path) -> None:
    """Names, places, sizes and attributes of an archive's entries, over which there is no checksum."""
    run = walk(start(), 1)
    run[0].save_checkpoint(path=tmp_path / "run.pt", module=run[1], optimizer=run[2])
    content = (tmp_path / "run.pt").read_bytes()
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        begin = archive.start_dir
        entry = archive.infolist()[-1]
    truth = told(read_checkpoint(io.BytesIO(content), {}))
    draw = random.Random(0)
    attributes = content.index(entry.filename.encode(), begin) - 8
    near = range(8 * (attributes - 400), 8 * (attributes + 4))
    for bit in (*near, *draw.sample(range(8 * begin, 8 * len(content)), 300)):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            found = read_checkpoint(io.BytesIO(flipped), {})
        except ArgumentError:
            continue
        assert told(found) == truth, bit


def told(saved: Any) -> Any:
    """All of it, to be compared."""
    if isinstance(saved, dict):
        return {key: told(value) for key, value in saved.items()}
    if isinstance(saved, (list, tuple)):
        return [told(value) for value in saved]
    return saved.tolist() if isinstance(saved, torch.Tensor) else saved


class Attack:
    """What a file may ask to be called where it is loaded as pickle."""

    def __reduce__(self) -> Any:
        return os.system, ("exit 1",)


@pytest.mark.parametrize("held", [Attack(), argparse.Namespace(lr=0.1)])
def test_code_is_not_run(held: Any, tmp_path: Path) -> None:
    run = walk(start(), 1)
    run[0].save_checkpoint(path=tmp_path / "run.pt", module=run[1], optimizer=run[2])
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    torch.save({**saved, "mine": held}, tmp_path / "run.pt")  # which save_checkpoint refuses
    other = start()
    with pytest.raises(ArgumentError, match=r"could run code .* torch_load_kwargs=.*weights_only"):
        other[0].load_checkpoint(path=tmp_path / "run.pt", module=other[1], optimizer=other[2])
    assert other[0].accountant.history == []
    if isinstance(held, argparse.Namespace):
        rest = other[0].load_checkpoint(
            path=tmp_path / "run.pt", module=other[1], optimizer=other[2],
            torch_load_kwargs={"weights_only": False},
        )  # fmt: skip
        assert rest["mine"] == held
        assert other[0].accountant.history == history(1)


def refuses(content: bytes) -> None:
    """A damaged file is refused, and what there was stays."""
    other = start()
    before = [p.clone() for p in other[1].parameters()]
    with pytest.raises(ArgumentError, match=r"damaged|holds a|newer one"):
        other[0].load_checkpoint(path=io.BytesIO(content), module=other[1], optimizer=other[2])
    assert other[0].accountant.history == []
    assert all(torch.equal(a, p) for a, p in zip(before, other[1].parameters(), strict=True))


@pytest.fixture(scope="module")
def whole() -> bytes:
    run = walk(start(), 3)
    file = io.BytesIO()
    run[0].save_checkpoint(path=file, module=run[1], optimizer=run[2])
    return file.getvalue()


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.3, 0.7, 0.95, 0.999])
def test_a_truncated_file(whole: bytes, kept: float) -> None:
    refuses(whole[: int(kept * len(whole))])


@pytest.mark.parametrize("kept", [100, 4095, 4100, 8000])
def test_a_truncated_file_on_the_disk(tmp_path: Path, kept: int) -> None:
    """torch.load reads it in another way than one in memory, and one of a page or more in a third."""
    run = walk(start(), 1)
    long = {"more": torch.arange(2000.0)}
    path = tmp_path / "run.pt"
    run[0].save_checkpoint(path=path, module=run[1], optimizer=run[2], checkpoint_dict=long)
    path.write_bytes(path.read_bytes()[:kept])
    other = start()
    with pytest.raises(ArgumentError, match="damaged"):
        other[0].load_checkpoint(path=path, module=other[1], optimizer=other[2])
    assert other[0].accountant.history == []


def test_a_flipped_bit(whole: bytes) -> None:
    """Anywhere: the file is refused, or all that is loaded is what was saved."""
    state = torch.load(io.BytesIO(whole), weights_only=True)
    draw = random.Random(0)
    refused = 0
    for _ in range(150):
        content = bytearray(whole)
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        other = start()
        try:
            other[0].load_checkpoint(path=io.BytesIO(content), module=other[1], optimizer=other[2])
        except ArgumentError:
            refused += 1
            assert other[0].accountant.history == []
            continue
        assert other[0].accountant.history == history(3)  # padding, or a field that nobody reads
        held = other[1]._module.state_dict()
        saved = state["module_state_dict"].items()
        assert all(torch.equal(held[k.removeprefix("_module.")], v) for k, v in saved)
    assert refused > 40


def test_a_newer_format_and_another_file(whole: bytes) -> None:
    state = torch.load(io.BytesIO(whole), weights_only=True)
    for held in ({**state, KEY: {"format": FORMAT + 1}}, {**state, KEY: 3}, [1, 2]):
        file = io.BytesIO()
        torch.save(held, file)
        refuses(file.getvalue())
    refuses(b"not a checkpoint at all")
    with pytest.raises(FileNotFoundError):
        start()[0].load_checkpoint(path="no such file", module=nn.Linear(1, 1))


def test_a_file_without_weights_changes_nothing(tmp_path: Path) -> None:
    run = walk(start(), 2)
    run[0].save_checkpoint(path=tmp_path / "run.pt", module=run[1], optimizer=run[2])
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    del saved["module_state_dict"]
    torch.save(saved, tmp_path / "run.pt")
    other = walk(start(), 1)
    with pytest.raises(ArgumentError, match="holds no module_state_dict, and nothing was loaded"):
        other[0].load_checkpoint(path=tmp_path / "run.pt", module=other[1], optimizer=other[2])
    assert other[0].accountant.history == history(1)

"""Each field of a checkpoint, changed: refused, or what was released is still counted in full."""

from __future__ import annotations

import argparse
import copy
import io
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from opacus.accountants import create_accountant

from fastclip.accounting.ledger import keep_ledger
from fastclip.errors import ArgumentError
from tests.accounting.test_engine_ledger import history, start, walk


def spent(steps: int = 3) -> dict[str, Any]:
    """The state of an accountant."""
    run = keep_ledger(create_accountant("rdp"))
    for _ in range(steps):
        run.step(noise_multiplier=1.0, sample_rate=0.25)
    return dict(run.state_dict())


CHANGES: dict[str, Any] = {
    "fewer steps": lambda s: s | {"history": [(1.0, 0.25, 2)]},
    "no steps": lambda s: s | {"history": []},
    "another sigma": lambda s: s | {"history": [(2.0, 0.25, 3)]},
    "another q": lambda s: s | {"history": [(1.0, 0.125, 3)]},
    "another mechanism": lambda s: s | {"mechanism": "prv"},
    "fewer in the segment": lambda s: s | {"segments": {n: [(1, 0.25, 1)] for n in s["segments"]}},
    "another name": lambda s: s | {"segments": {"0": next(iter(s["segments"].values()))}},
    "no segments": lambda s: {k: v for k, v in s.items() if k != "segments"},
    "nobody protected": lambda s: {k: v for k, v in s.items() if k != "fastclip_protected"},
    "another unit": lambda s: (
        s | {"fastclip_protected": {"units": ["unit"], "size_is_secret": True}}
    ),
    "another digest": lambda s: s | {"fastclip_digest": "0" * 64},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_field_of_the_ledger(change: str) -> None:
    other = keep_ledger(create_accountant("rdp"))
    with pytest.raises(ArgumentError, match="damaged"):
        other.load_state_dict(CHANGES[change](copy.deepcopy(spent())))
    assert other.history == []
    assert not other.segments()


@pytest.mark.parametrize("entry", [
    (math.inf, 0.25, 3), (math.nan, 0.25, 3), (-1.0, 0.25, 3), (1.0, 0.0, 3), (1.0, 1.5, 3),
    (1.0, math.nan, 3), (1.0, -0.25, 3), (1.0, 0.25, -2), (1.0, 0.25, 2.5), (1.0, 0.25, math.nan),
    (1.0, 0.25, True),
])  # fmt: skip
def test_entries_that_no_run_has_without_a_digest(entry: tuple[float, float, Any]) -> None:
    """As plain Opacus writes them: a step of no cost, or fewer than none, would be read as one."""
    other = keep_ledger(create_accountant("rdp"))
    with pytest.raises(ArgumentError, match="damaged"):
        other.load_state_dict({"mechanism": "rdp", "history": [(1.0, 0.25, 3), entry]})
    assert other.history == []


def test_what_cannot_be_loaded_is_not_saved(tmp_path: Path) -> None:
    """An old file stays, and so does what an open one held."""
    run = walk(start(), 1)
    path, file = tmp_path / "run.pt", io.BytesIO()
    run[0].save_checkpoint(path=path, module=run[1], optimizer=run[2])
    before = path.read_bytes()
    held = {"mine": argparse.Namespace(lr=0.1)}
    for where in (path, file):
        with pytest.raises(
            ArgumentError,
            match=r"other than tensors and plain values .*Namespace.*could not be loaded",
        ):
            run[0].save_checkpoint(
                path=where, module=run[1], optimizer=run[2], checkpoint_dict=dict(held)
            )
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["run.pt"]
    run[0].save_checkpoint(path=path, module=run[1], checkpoint_dict={"mine": {"lr": 0.1}})
    other = start()
    assert other[0].load_checkpoint(path=path, module=other[1])["mine"] == {"lr": 0.1}


def parts() -> tuple[Any, dict[str, Any]]:
    run = walk(start(), 3)
    held = run[0].run_state(module=run[1], optimizer=run[2])
    return run, held.state_dict()


def test_a_flipped_bit_of_a_run_that_is_saved_in_parts() -> None:
    """Of the bytes that hold the ledger and the thresholds: torch.load looks at no checksum."""
    _, state = parts()
    draw, refused = random.Random(0), 0
    for _ in range(60):
        content = bytearray(state["run"])
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        other = start()
        weights = [p.clone() for p in other[1].parameters()]
        held = other[0].run_state(module=other[1], optimizer=other[2])
        try:
            held.load_state_dict({**state, "run": bytes(content)})
        except ArgumentError:
            refused += 1
            assert other[0].accountant.history == []
            assert all(
                torch.equal(a, b) for a, b in zip(weights, other[1].parameters(), strict=True)
            )
            continue
        assert other[0].accountant.history == history(3)
    assert refused > 20


def test_a_run_in_parts_without_its_ledger() -> None:
    _, state = parts()
    empty = io.BytesIO()
    torch.save({"clipping": None}, empty)
    other = start()
    held = other[0].run_state(module=other[1], optimizer=other[2])
    for run in ({}, {"run": empty.getvalue()}, {"run": b""}, {"run": 3}):
        rest = {name: value for name, value in state.items() if name != "run"}
        with pytest.raises(ArgumentError, match=r"privacy spent by its run is unknown|damaged"):
            held.load_state_dict({**rest, **run})
    held.load_state_dict(state)
    assert other[0].accountant.history == history(3)


def test_parts_of_before_there_were_stamps() -> None:
    run, state = parts()
    plain = io.BytesIO()
    torch.save({"ledger": run[0].accountant.state_dict(), "clipping": None}, plain)
    other = start()
    held = other[0].run_state(module=other[1], optimizer=other[2])
    held.load_state_dict({**state, "run": plain.getvalue()})
    assert other[0].accountant.history == history(3)

"""bench.worst_case finds what is broken on purpose, makes it again to the bit, and forgets nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.worst_case import __main__ as command
from bench.worst_case.genome import Count, drawn
from bench.worst_case.operands import ascended, pair, pair_genes
from bench.worst_case.picture import draw
from bench.worst_case.products import product
from bench.worst_case.ratios import MEASURES, of_record
from bench.worst_case.search import Search, exceeded, replayed
from bench.worst_case.targets import TARGETS, Target
from fastclip import ops
from fastclip.ops import grams
from fastclip.rules.records import ConvRecord, KeptRecord, LinearRecord

Patch = pytest.MonkeyPatch


def found_in(target: Target, trials: int, seed: int = 0) -> dict[str, Any]:
    return Search(target, seed).run(1e9, trials)


def small(name: str) -> Target:
    """The target on small operands, which take no time."""
    space = {**TARGETS[name].space, "t": Count(1, 256), "d": Count(1, 12), "p": Count(1, 12)}
    return replace(TARGETS[name], space=space)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [n for n, t in TARGETS.items() if not t.interpreted])
def test_every_target_answers(name: str) -> None:
    target = TARGETS[name]
    found = found_in(target, 3)
    assert found["trials"] == 3
    assert found["refused"] < 3
    assert exceeded(target, found) == []


# ---- what was once broken ------------------------------------------------------------------------

ONCE = json.loads((Path(__file__).parent / "worst_once.json").read_text())
"""What the search has found: contributions of 1.000002 to 1.75 C."""


@pytest.mark.parametrize("row", ONCE, ids=lambda row: row["target"])
def test_what_was_found_is_mended(row: dict[str, Any]) -> None:
    ratios = TARGETS[row["target"]].ratios(row["genome"])
    assert ratios is not None
    assert 0.4 < ratios.contribution <= 1


def test_a_pointwise_convolution_of_the_same_rows() -> None:
    (genome,) = (row["genome"] for row in ONCE if row["target"] == "linear/transposed")
    a, g = (x[None].mT.contiguous() for x in pair(genome, ((21, 1560), (21, 168))))
    geometry = ops.ConvGeometry((168, 1560, 1), (1,), (0,), (1,), 1)
    record = ConvRecord(a, g, geometry, ghost=True)
    assert of_record(genome, record, 0, None, "").contribution <= 1


# ---- what is broken on purpose -------------------------------------------------------------------


def _small_norm(patch: Patch) -> None:
    own = KeptRecord.norm_sq
    patch.setattr(KeptRecord, "norm_sq", lambda self: own(self) * 0.999**2)


def _other_order(patch: Patch) -> None:
    """The sum is made again, of the operands, by another product."""
    patch.setattr(
        LinearRecord, "clipped_sum", lambda self, scale: ops.scaled_sum(self.a, self.g, scale)
    )
    patch.setattr(ops, "product_margin", lambda a, g, taps=1: a.new_zeros(len(a)))


def _nothing_raised(patch: Patch) -> None:
    patch.setattr(grams.GramNorm, "raised", lambda self: self.total.clamp_min(0))


def _large_sum(patch: Patch) -> None:
    own = ops.lookup_sum
    patch.setattr(ops, "lookup_sum", lambda *args: own(*args) * (1 + 2.0**-16))


def _not_finite(patch: Patch) -> None:
    patch.setattr(LinearRecord, "clipped_sum", lambda self, scale: torch.full((1,), torch.nan))


DEFECTS: dict[str, tuple[str, Callable[[Patch], None]]] = {
    "a norm times 0.999": ("linear/kept", _small_norm),
    "a sum in another order": ("linear/recomputed", _other_order),
    "a Gram's norm as it comes": ("linear/ghost", _nothing_raised),
    "a sum that is a little too large": ("lookup", _large_sum),
    "a sum that is not finite": ("linear/ghost", _not_finite),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found(defect: str, monkeypatch: Patch) -> None:
    """In PyTorch: the loops of fastclip._C round too little for so short a search."""
    name, breaks = DEFECTS[defect]
    target = replace(small(name), backend="reference")
    assert "contribution" not in exceeded(target, found_in(target, 500))
    breaks(monkeypatch)
    found = found_in(target, 500)
    assert "contribution" in exceeded(target, found)
    again = {measure: now for measure, _, now in replayed(target, found)}
    assert again["contribution"] == found["contribution"]["ratio"]


# ---- the search ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear/ghost", "conv/kept", "engine/linear"])
def test_replays_are_exact(name: str) -> None:
    target = TARGETS[name]
    found = json.loads(json.dumps(found_in(target, 12)))  # as a file has it
    rows = [*replayed(target, found)]
    assert {measure for measure, _, _ in rows} == set(MEASURES)
    assert all(then == now for _, then, now in rows)


@pytest.mark.extras
def test_the_worst_are_varied() -> None:
    """So the search comes further than as many draws from anywhere."""
    target, rng = small("linear/ghost"), random.Random(1)
    alone = [target.ratios(drawn(target.space, rng)) for _ in range(500)]
    under = max(r.underestimate or 0.0 for r in alone if r is not None)
    assert found_in(target, 500)["underestimate"]["ratio"] > under


def test_ascent_lets_more_cancel() -> None:
    torch.manual_seed(0)
    a, g = torch.randn(12, 3, dtype=torch.float64), torch.randn(12, 4, dtype=torch.float64)

    def cancelled(x: Tensor, y: Tensor) -> float:
        return (x.norm() * y.norm() / product(x, y).norm()).item()

    assert cancelled(*ascended(a, g, product, 20)) > 2 * cancelled(a, g)


@pytest.mark.parametrize("seed", range(20))
def test_operands_are_those_of_the_genome(seed: int) -> None:
    genome = drawn(pair_genes(), random.Random(seed))
    shapes = ((1 + seed, 3), (1 + seed, 2))
    first, again = pair(genome, shapes, product), pair(genome, shapes, product)
    assert [tuple(x.shape) for x in first] == list(shapes)
    for x, y in zip(first, again, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


# ---- the command ---------------------------------------------------------------------------------


def run(out: Path, *targets: str) -> int:
    """A turn of each, of one trial."""
    return command.main(["--out", str(out), "--minutes", "0", "--targets", *targets])


def test_a_file_is_gone_on_from(tmp_path: Path) -> None:
    out, names = tmp_path / "worst.json", ["lookup", "linear/kept"]
    target = TARGETS["lookup"]
    command.write(out, {"lookup": found_in(target, 20)}, [])
    kept = json.loads(out.read_text())["targets"]["lookup"]["contribution"]
    assert run(out, *names) == 0
    first = json.loads(out.read_text())
    assert set(first) == {"command", "date", "versions", "machine", "targets"}
    assert set(first["targets"]) == set(names)
    assert run(out, "lookup") == 0
    second = json.loads(out.read_text())["targets"]
    assert second["lookup"]["trials"] == 22
    assert second["lookup"]["contribution"]["room_used"] >= kept["room_used"]
    assert second["linear/kept"] == first["targets"]["linear/kept"]


def test_what_is_beyond_is_said_and_replayed(
    tmp_path: Path, monkeypatch: Patch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "worst.json"
    with monkeypatch.context() as patch:
        _small_norm(patch)
        command.write(out, {"linear/kept": found_in(TARGETS["linear/kept"], 40)}, [])
        assert command.main(["--replay", str(out)]) == 1
        assert "the same" in capsys.readouterr().out
    assert command.main(["--replay", str(out)]) == 0  # mended since
    assert "on record 1.00" in capsys.readouterr().out


def test_the_picture(tmp_path: Path) -> None:
    found = {name: found_in(TARGETS[name], 3) for name in ("lookup", "linear/kept")}
    draw(found, tmp_path / "worst.png")
    assert (tmp_path / "worst.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="nothing to draw"):
        draw({}, tmp_path / "worst.png")


@pytest.mark.slow
def test_the_interpreter_has_a_process_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    out = tmp_path / "worst.json"
    assert run(out, "triton/linear/kept") == 0
    assert command.main(["--replay", str(out)]) == 0

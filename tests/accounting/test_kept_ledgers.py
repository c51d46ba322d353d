"""No step is released that the file does not get: ends, copies, second files, histories that are cut."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from opacus.accountants import create_accountant

from fastclip import FastPrivacyEngine
from fastclip.errors import ArgumentError, StepError
from tests.accounting.files import logged
from tests.accounting.runs import cause_and_fix
from tests.accounting.test_engine_ledger import history, load, saved, start, walk

FIX = r"is not released\. .*engine\.write_ahead, or None .*errors\.html#checkpoints"


def replace(path: Path) -> None:
    """By a file of the same content."""
    path.rename(path.with_name("old"))
    path.write_bytes(path.with_name("old").read_bytes())


LOSSES: dict[str, tuple[Callable[[Path], object], str]] = {
    "deleted": (lambda path: path.unlink(), "moved or deleted"),
    "moved": (lambda path: path.rename(path.with_name("elsewhere")), "moved or deleted"),
    "replaced": (replace, "another file has replaced it"),
    "folder": (lambda path: path.parent.rename(path.parent.with_name("new")), "moved or deleted"),
}


def kept(folder: Path, steps: int = 0):
    """A run that keeps its ledger in `folder`/ledger."""
    run = start()
    run[0].write_ahead(folder / "ledger")
    return walk(run, steps)


def refuses(run, why: str) -> None:
    """A step is refused, and the weights stay."""
    before = [p.clone() for p in run[1].parameters()]
    with pytest.raises(StepError, match=why) as caught:
        walk(run, 1)
    assert cause_and_fix(caught.value)
    assert all(torch.equal(old, p) for old, p in zip(before, run[1].parameters(), strict=True))


def test_a_closed_file_stops_the_step(tmp_path: Path) -> None:
    run = kept(tmp_path, 2)
    run[0].accountant.log.close()
    for _ in range(2):
        refuses(run, "it was closed.*" + FIX)
    assert run[0].accountant.history == history(2)
    run[0].write_ahead(tmp_path / "other")
    walk(run, 1)
    assert (logged(tmp_path / "ledger"), logged(tmp_path / "other")) == (2, 3)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_file_that_is_lost_stops_the_step(tmp_path: Path, loss: str) -> None:
    act, why = LOSSES[loss]
    folder = tmp_path / "folder"
    folder.mkdir()
    run = kept(folder, 2)
    act(folder / "ledger")
    for _ in range(2):
        refuses(run, why + ".*" + FIX)
    assert run[0].accountant.history == history(2)
    run[0].write_ahead(tmp_path / "other")
    walk(run, 1)
    assert logged(tmp_path / "other") == 3


def test_a_link_that_leads_elsewhere(tmp_path: Path) -> None:
    """A path is where it leads to, at each write."""
    (tmp_path / "link").symlink_to(tmp_path / "real")
    run = start()
    run[0].write_ahead(tmp_path / "link")
    walk(run, 1)
    assert logged(tmp_path / "real") == 1
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to(tmp_path / "another")
    (tmp_path / "another").write_bytes(b"")
    refuses(run, "another file has replaced it")


def test_it_ends_when_it_is_told_to(tmp_path: Path) -> None:
    run = kept(tmp_path, 2)
    run[0].write_ahead(None)
    run[0].write_ahead(None)
    walk(run, 1)
    assert run[0].accountant.log is None
    assert logged(tmp_path / "ledger") == 2
    run[0].write_ahead(tmp_path / "ledger")  # begun again, it gets what it lacks
    assert logged(tmp_path / "ledger") == 3
    assert run[0].accountant.history == history(3)


def test_a_second_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = kept(tmp_path, 1)
    os.link(tmp_path / "ledger", tmp_path / "hard")
    for path in ("other", "ledger", "./../" + tmp_path.name + "/ledger", "hard"):
        with pytest.raises(
            ArgumentError, match=r"already writes to .*ledger.*write_ahead\(None\)"
        ) as caught:
            run[0].write_ahead(path)
        assert cause_and_fix(caught.value)
    assert not (tmp_path / "other").exists()
    walk(run, 1)
    assert logged(tmp_path / "ledger") == 2


def test_two_engines_and_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is called."""
    monkeypatch.chdir(tmp_path)
    run = kept(tmp_path, 1)
    os.link(tmp_path / "ledger", tmp_path / "hard")
    (tmp_path / "link").symlink_to("ledger")
    before = (tmp_path / "ledger").read_bytes()
    for path in ("ledger", "./ledger", "hard", "link"):
        with pytest.raises(ArgumentError, match="Another engine or process writes to") as caught:
            start()[0].write_ahead(path)
        assert cause_and_fix(caught.value)
    assert (tmp_path / "ledger").read_bytes() == before
    walk(run, 1)
    assert logged(tmp_path / "ledger") == 2


def test_an_engine_that_nobody_has_any_more(tmp_path: Path) -> None:
    """Without close, in a circle of references that is not collected yet."""
    gc.disable()
    try:
        run = kept(tmp_path, 2)
        run[0].itself = run[0]
        del run
        assert kept(tmp_path, 1)[0].accountant.history == history(3)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "content", [b"my notes", b"my\nnotes\n", b"00000000 {}\n", b"\n", b"fastclip ledger 3 "]
)
def test_a_file_that_is_no_ledger_is_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    """Also the first format's, whose lines could be lost without notice."""
    (tmp_path / "ledger").write_bytes(content)
    run = start()
    with pytest.raises(ArgumentError, match=r"not of this version.*left unchanged") as caught:
        run[0].write_ahead(tmp_path / "ledger")
    assert cause_and_fix(caught.value)
    assert (tmp_path / "ledger").read_bytes() == content
    walk(run, 1)


@pytest.mark.parametrize("cut", [0, 9])
@pytest.mark.filterwarnings("ignore:GDP accounting")
def test_a_ledger_that_cannot_be_counted_is_left_as_it_is(tmp_path: Path, cut: int) -> None:
    """Torn end included."""
    kept(tmp_path, 2)[0].write_ahead(None)
    path = tmp_path / "ledger"
    path.write_bytes(path.read_bytes()[: -cut or None])
    before = path.read_bytes()
    gdp = FastPrivacyEngine(accountant="gdp")
    gdp.accountant.step(noise_multiplier=7.0, sample_rate=0.1)
    with pytest.raises(ArgumentError, match="expects a constant noise multiplier"):
        gdp.write_ahead(path)
    assert path.read_bytes() == before
    assert gdp.accountant.history == [(7.0, 0.1, 1)]
    kept(tmp_path)  # nobody holds it


def test_a_file_of_a_refused_engine_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = walk(start(), 1)
    full = OSError(28, "no space left on device")

    def no_room(*_: object) -> int:
        raise full

    monkeypatch.setattr(os, "write", no_room)
    with pytest.raises(StepError, match="no space left"):
        run[0].write_ahead(tmp_path / "ledger")
    assert not (tmp_path / "ledger").exists()


def test_what_is_no_file(tmp_path: Path) -> None:
    """It would keep nothing."""
    engine = FastPrivacyEngine()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", os.devnull):
        with pytest.raises(ArgumentError, match="not a regular file"):
            engine.write_ahead(path)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_of_the_ledger_take_no_steps(tmp_path: Path, copied) -> None:
    run = kept(tmp_path, 2)
    twin = copied(copied(run[0].accountant))
    with pytest.raises(StepError, match="is a copy and does not write to .*" + FIX) as caught:
        twin.step(noise_multiplier=1.0, sample_rate=1.0)
    assert cause_and_fix(caught.value)
    assert twin.history == history(2)
    walk(run, 1)
    assert logged(tmp_path / "ledger") == 3


def test_a_pickled_engine_takes_a_file_of_its_own(tmp_path: Path) -> None:
    run = kept(tmp_path, 2)
    twin = start(pickle.loads(pickle.dumps(run[0])))
    refuses(twin, "This ledger is a copy")
    twin[0].write_ahead(tmp_path / "other")
    walk(twin, 1)
    assert (logged(tmp_path / "ledger"), logged(tmp_path / "other")) == (2, 3)
    free = start(pickle.loads(pickle.dumps(run[0])))
    free[0].write_ahead(None)
    walk(free, 1)
    walk(start(copy.deepcopy(run[0]), seed=1), 1)  # in the same ledger
    assert logged(tmp_path / "ledger") == 3


def test_the_accountant_of_another_engine(tmp_path: Path) -> None:
    """Its file gets the steps of both; two files do not become one."""
    first, second = kept(tmp_path, 1), walk(start(), 2)
    second[0].accountant = first[0].accountant
    walk(second, 1)
    assert logged(tmp_path / "ledger") == 4
    third = start()
    third[0].write_ahead(tmp_path / "third")
    with pytest.raises(ArgumentError, match=r"already writes to .*ledger"):
        third[0].accountant = first[0].accountant
    walk(third, 1)
    assert logged(tmp_path / "third") == 1


@pytest.mark.parametrize("clear", [
    lambda a: a.history.clear(), lambda a: setattr(a, "history", []),
    lambda a: setattr(a, "history", [(3.0, 1.0, 1)]),
])  # fmt: skip
def test_steps_after_a_history_was_cleared(tmp_path: Path, clear) -> None:
    """They are none of those that are known under the name before."""
    run = kept(tmp_path, 3)
    early = saved(run)
    clear(run[0].accountant)
    by_hand = len(run[0].accountant.history)
    walk(run, 2)
    assert logged(tmp_path / "ledger") == 5 + by_hand
    load(run, early)
    assert sum(steps for *_, steps in run[0].accountant.history) == 5 + by_hand
    run[0].write_ahead(None)
    run[0].write_ahead(tmp_path / "other")
    assert logged(tmp_path / "other") == 5 + by_hand


def test_a_step_that_is_taken_back_by_hand(tmp_path: Path) -> None:
    """It stays in the file; those before and after it count once."""
    run = kept(tmp_path, 3)
    before = list(run[0].accountant.history)
    walk(run, 1)
    run[0].accountant.history = before
    walk(run, 2)
    assert run[0].accountant.history == history(5)
    assert logged(tmp_path / "ledger") == 6
    load(run, saved(run))
    assert run[0].accountant.history == history(5)


def test_steps_that_are_added_by_hand(tmp_path: Path) -> None:
    run = kept(tmp_path, 1)
    run[0].accountant.history.append((9.0, 1.0, 4))
    walk(run, 1)
    assert logged(tmp_path / "ledger") == 6


def test_a_lost_end_is_written_again(tmp_path: Path) -> None:
    """Whole lines lost from the end: the file cannot tell, who knows more can."""
    run = kept(tmp_path, 5)
    late = saved(run)
    run[0].write_ahead(None)
    path = tmp_path / "ledger"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    later = kept(tmp_path)
    assert later[0].accountant.history == history(3)
    load(later, late)
    assert later[0].accountant.history == history(5)
    assert logged(path) == 5


def test_another_accountant_after_the_end(tmp_path: Path) -> None:
    run = kept(tmp_path, 1)
    run[0].accountant.log.close()
    run[0].accountant = create_accountant("prv")
    refuses(run, "it was closed")
    load(run, saved(walk(start(FastPrivacyEngine()), 2)))  # was released elsewhere
    refuses(run, "it was closed")
    run[0].write_ahead(tmp_path / "ledger")
    assert logged(tmp_path / "ledger") == 3

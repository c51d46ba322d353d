"""Other forms in which the same data come; and the real data, where they are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.papers.data import adult, dutch, mnist
from tests.bench.papers.folders import CASES
from tests.refusal import refused


def test_the_csv_file_of_the_dutch_census(folders, copy) -> None:
    """dutch.csv has words for sexes and numbers for occupations, and the arff file's codes else."""
    folder = copy("dutch")
    lines = (folder / dutch.FILES[0]).read_text().splitlines()
    data = [line.split(",") for line in lines[lines.index("@data") + 1 :] if line]
    sexes, occupations = {"1": "male", "2": "female"}, {"5_4_9": "0", "2_1": "1"}
    table = [",".join([sexes[row[0]], *row[1:-1], occupations[row[-1]]]) for row in data]
    (folder / dutch.FILES[0]).unlink()
    (folder / "dutch.csv").write_text("\n".join([",".join(dutch.NAMES), *table, ""]))
    ours, theirs = dutch.load(folder), dutch.load(folders["dutch"])
    assert ours.split == theirs.split
    assert (ours.train.x[0] == theirs.train.x[0]).all()
    assert (ours.train.groups["sex"] == theirs.train.groups["sex"]).all()


@pytest.mark.parametrize(
    ("file", "header", "female", "male"),
    [
        ("dutch.csv", [",".join(dutch.NAMES)], "female,{},0", "male,{},1"),
        (
            "dutch_census_2001.arff",
            [*(f"@attribute {name} {{}}" for name in dutch.NAMES), "@data"], "2,{},5_4_9", "1,{},2_1",
        ),
    ],
)  # fmt: skip
def test_a_dutch_census_of_the_published_size(
    file: str, header: list[str], female: str, male: str, tmp_path: Path
) -> None:
    """60,420 people: 30,273 females and 30,147 males, as counted in both published files; the other way
    round it is none of them."""
    codes = ",".join(column.values[0] for column in dutch.COLUMNS)
    for females, males in ((30_273, 30_147), (30_147, 30_273)):
        people = [female.format(codes)] * females + [male.format(codes)] * males
        (tmp_path / file).write_text("\n".join([*header, *people, ""]))
        if females > males:
            data = dutch.load(tmp_path)
            sexes = data.train.groups["sex"].bincount() + data.test.groups["sex"].bincount()
            assert sexes.tolist() == [30_273, 30_147]
            assert not data.synthetic
        else:
            with refused(f"{file}, females: 30,147 rows, but the published data have 30,273"):
                dutch.load(tmp_path)


def test_adult_with_a_header_and_without_spaces(folders, copy) -> None:
    folder = copy("adult")
    for file in CASES["adult"].files:
        text = (folder / file).read_text().replace("|1x3 Cross validator\n", "").replace(", ", ",")
        (folder / file).write_text(",".join(adult.NAMES) + "\n" + text)
    ours, theirs = adult.load(folder), adult.load(folders["adult"])
    assert ours.split == theirs.split
    assert (ours.train.x[0] == theirs.train.x[0]).all()


DATA = os.environ.get("FASTCLIP_DATA")


@pytest.mark.skipif(
    DATA is None, reason="FASTCLIP_DATA names no folder of real data (adult/, mnist/)"
)
class TestRealFiles:
    def test_adult(self) -> None:
        data = adult.load(Path(DATA) / "adult")
        assert data.split["rows"] == {"train": 36_177, "test": 9_045}
        sexes = data.train.groups["sex"].bincount() + data.test.groups["sex"].bincount()
        assert sexes.tolist() == [14_695, 30_527]
        rich = data.train.y.sum() + data.test.y.sum()
        assert rich / 45_222 == pytest.approx(0.2478, abs=5e-5)  # as adult.names states it
        assert not data.synthetic

    def test_balanced_adult(self) -> None:
        data = adult.load(Path(DATA) / "adult", balanced=True, validation=0.1)
        parts = (data.train, data.validation, data.test)
        assert [len(part) for part in parts] == [19_600, 2_800, 5_600]
        sexes = sum(part.groups["sex"].bincount() for part in parts)
        assert sexes.tolist() == [14_000, 14_000]

    def test_mnist(self) -> None:
        data = mnist.load(Path(DATA) / "mnist", kept=0.1)
        everything = mnist.load(Path(DATA) / "mnist", reduced_class=None)
        whole = len(everything.train) + len(everything.test)
        assert (len(everything.train), len(everything.test)) in [(8_000, 2_000), (60_000, 10_000)]
        assert whole in (10_000, 70_000)
        eights = everything.train.y.bincount()[8].item()
        assert data.train.y.bincount()[8] == round(0.1 * eights)
        assert len(data.test) == len(everything.test)
        assert data.train.x[0].aminmax() == (-1, 1)

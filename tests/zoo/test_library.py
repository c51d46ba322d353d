"""Models of transformers and adapters of peft, tiny and untrained."""

from __future__ import annotations

import pytest

from tests.zoo.families import marked
from tests.zoo.library import ADAPTERS, TRANSFORMERS
from tests.zoo.member import check

MEMBERS = {**TRANSFORMERS.members, **ADAPTERS.members}
QUICK = ["AlbertForSequenceClassification", "DoRA of convolutions", "LoRA of convolutions"]


@pytest.mark.parametrize("name", marked(MEMBERS, QUICK))
def test_exact(name: str) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    check(MEMBERS[name], sizes=(3,))

"""What the two ranks of tests/distributed/test_counts.py count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fastclip import FastPrivacyEngine
from fastclip.accounting.ledger_file import WriteAheadLog
from fastclip.counts import TRAINING_SET
from tests.counts.runs import APART, accuracy, predictions
from tests.distributed.ledgers import said, train
from tests.distributed.training import private, rank, wrapped


def counted(folder: str) -> dict[str, Any]:
    """A run that counts its training set and another data set, and what is refused."""
    early = said(lambda: FastPrivacyEngine().count(accuracy(APART), **predictions()))
    torch.manual_seed(5)
    made = private(wrapped("ddp"), sigma=1.0)
    engine = made[0]
    engine.write_ahead(Path(folder) / "ledger")
    train(made, 2)
    answers = [engine.count(accuracy(data), **predictions()) for data in (APART, TRAINING_SET)]
    paid = engine.prepay(accuracy(APART), 2)
    answers += [paid.count(**predictions()) for _ in range(2)]
    refused = {
        "shards": said(lambda: engine.count(accuracy(APART), **predictions(30 + rank()))),
        "queries": said(lambda: engine.count(accuracy(APART, 5.0 + rank()), **predictions())),
        "bad": said(lambda: engine.count(accuracy(APART), groups=[9 * rank()],
                                         measures={"correct": [1]})),
    }  # fmt: skip
    train(made, 1)
    log = WriteAheadLog(Path(folder) / "ledger", writes=False)
    return {
        "early": early, "answers": [a.counts.tolist() for a in answers], **refused,
        "training": [tuple(e) for e in engine.accountant.history],
        "validation": [tuple(e) for e in engine.accountant.lines["validation"].history],
        "names": list(engine.accountant.lines["validation"].segments()),
        "in the file": sorted(e for part in log.found().segments.values() for e in part),
        "line in the file": [e for part in log.found("validation").segments.values() for e in part],
    }  # fmt: skip

"""mostlyai-engine on a sequence of rows a person: its recurrent model, one person a sample."""

from pathlib import Path

import numpy as np
import pandas as pd
from mostlyai import engine

from bench.clients.about import About
from bench.clients.programs.mostlyai_flat import train

ABOUT = About(
    title="mostlyai-engine, sequential table",
    version="mostlyai-engine",
    kind="tabular",
    runs="`train` of MOSTLY_AI/Small (with Opacus' LSTM) on 1,000 people of 1 to 6 rows of 3 "
    "columns, batch 256, 3 epochs; "
    "`generate`",
    note="each person's loss is divided by the number of rows of the whole batch "
    "(`_calculate_sample_losses`). What one person contributes depends on the others. "
    "Opacus trains and states an epsilon that this loss does not have",
)


def visits(people: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(people, their visits)."""
    rng = np.random.default_rng(0)
    keys = np.arange(people)
    context = pd.DataFrame({"id": keys, "region": rng.choice(list("abcd"), people)})
    owners = np.repeat(keys, rng.integers(1, 7, people))
    rows = len(owners)
    target = pd.DataFrame(
        {
            "person": owners,
            "ward": rng.choice(["a", "b", "c", "d", "e"], rows),
            "days": rng.integers(0, 30, rows),
            "cost": rng.normal(100, 30, rows).round(),
        }
    )
    return context, target


def main(tiny: bool) -> dict:
    workspace = Path("workspace").resolve()
    context, target = visits(100 if tiny else 1000)
    engine.split(
        tgt_data=target,
        ctx_data=context,
        tgt_context_key="person",
        ctx_primary_key="id",
        workspace_dir=workspace,
        model_type="TABULAR",
    )
    return train(workspace, tiny, epochs=3)

"""mostlyai-engine, its own commands on a flat table: split, analyze, encode, train with privacy,
generate.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from mostlyai import engine

from bench.clients.about import About

ABOUT = About(
    title="mostlyai-engine, flat table",
    version="mostlyai-engine",
    kind="tabular",
    runs="`train` of MOSTLY_AI/Small on 5,000 rows of 9 columns, flexible order of columns, "
    "batch 256, 4 epochs; "
    "`generate` of 200 rows",
    note="installed without its pins of torchaudio, torchvision and psutil, which nothing here "
    "uses",
)
PRIVACY = {"max_epsilon": 100.0, "noise_multiplier": 1.5, "max_grad_norm": 1.0, "delta": 1e-5}


def people(rows: int) -> pd.DataFrame:
    """Columns as in the census of incomes."""
    rng = np.random.default_rng(0)
    school = rng.integers(1, 17, rows)
    return pd.DataFrame(
        {
            "age": rng.integers(17, 91, rows),
            "workclass": rng.choice(list("abcdefgh"), rows),
            "education": np.char.add("school", (school // 2).astype(str)),
            "education_num": school,
            "marital": rng.choice(["single", "married", "divorced", "widowed"], rows),
            "occupation": np.char.add("job", rng.integers(14, size=rows).astype(str)),
            "sex": rng.choice(["f", "m"], rows),
            "hours": rng.normal(40, 12, rows).clip(1, 99).astype(int),
            "income": np.where(school + rng.normal(0, 4, rows) > 11, ">50K", "<=50K"),
        }
    )


def spent(workspace: Path) -> dict:
    """Epsilon and loss of its last message."""
    path = next(workspace.rglob("progress-messages.csv"))
    last = pd.read_csv(path).dropna(subset=["dp_eps"]).iloc[-1]
    return {"epsilon": float(last["dp_eps"]), "loss": float(last["trn_loss"])}


def train(workspace: Path, tiny: bool, epochs: float) -> dict:
    engine.analyze(workspace_dir=workspace, value_protection=False)
    engine.encode(workspace_dir=workspace)
    engine.train(
        model="MOSTLY_AI/Small",
        workspace_dir=workspace,
        max_epochs=1 if tiny else epochs,
        batch_size=16 if tiny else 256,
        differential_privacy=PRIVACY,
        device="cpu",
    )
    engine.generate(workspace_dir=workspace, sample_size=10 if tiny else 200, device="cpu")
    return spent(workspace)


def main(tiny: bool) -> dict:
    workspace = Path("workspace").resolve()
    engine.split(
        tgt_data=people(200 if tiny else 5000), workspace_dir=workspace, model_type="TABULAR"
    )
    return train(workspace, tiny, epochs=4)

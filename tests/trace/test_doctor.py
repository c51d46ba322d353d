"""`python -m fastclip.doctor script.py`: a script's first private step, traced and not taken."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastclip import doctor
from fastclip.engine.optimizer import FastDPOptimizer

SCRIPT = """
import sys
import torch
import torch.nn.functional as F
from pathlib import Path
from torch.utils.data import DataLoader, TensorDataset
from fastclip import FastPrivacyEngine


def losses(out, y):
    {loss}


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    data = TensorDataset(torch.randn(32, 4), torch.arange(32) % 3)
    engine = FastPrivacyEngine()
    private, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=8), noise_multiplier=1.0, max_grad_norm=1.0,
    )
    before = torch.cat([p.detach().flatten() for p in model.parameters()])
    try:
        for x, y in loader:
            optimizer.zero_grad()
            try:
                losses(private(x), y).backward()
            {forgives}
            optimizer.step()
    finally:
        after = torch.cat([p.detach().flatten() for p in model.parameters()])
        taken = sum(steps for *_, steps in engine.accountant.history)
        Path(sys.argv[1]).write_text(f"{{sys.argv[1:]}} {{torch.equal(before, after)}} {{taken}}")


if __name__ == "__main__":
    {ends}
    main()
"""
LOSSES = {
    "proven": "return F.cross_entropy(out, y)",
    "coupled": "return F.cross_entropy(out, y) * out.std(0).sum()",
    "crashes": "raise KeyError('of the script')",
}


def written(
    folder: Path, loss: str = "proven", forgives: str = "finally: pass", ends: str = "pass"
) -> Path:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(loss=LOSSES[loss], forgives=forgives, ends=ends))
    return script


def check_nothing_was_taken(folder: Path) -> None:
    told = (folder / "said").read_text()
    assert told == f"{[str(folder / 'said'), '--more']} True 0"


@pytest.mark.parametrize(
    ("loss", "status", "said"),
    [
        ("proven", 0, "traced step 1: "),
        ("coupled", 1, "GraphError: Your loss"),
        ("crashes", 2, "has ended before"),
    ],
)
def test_the_first_step_is_judged_and_not_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], loss: str, status: int, said: str
) -> None:
    script, before, plain = written(tmp_path, loss), list(sys.argv), FastDPOptimizer.pre_step
    path = list(sys.path)
    assert doctor.main([str(script), str(tmp_path / "said"), "--more"]) == status
    captured = capsys.readouterr()
    assert said in captured.out
    assert ("KeyError" in captured.err) == (loss == "crashes")
    if loss == "coupled":
        assert "train.py:" in captured.out
    check_nothing_was_taken(tmp_path)
    assert (sys.argv, sys.path, FastDPOptimizer.pre_step) == (before, path, plain)
    assert torch._C._len_torch_dispatch_stack() == 0


@pytest.mark.parametrize("forgives", ["except Exception: pass", "except: pass"])
@pytest.mark.parametrize("loss", ["proven", "coupled"])
def test_scripts_that_forgive_errors(tmp_path: Path, loss: str, forgives: str) -> None:
    """The first verdict is the answer, whatever is caught."""
    script = written(tmp_path, loss, forgives)
    status = doctor.main([str(script), str(tmp_path / "said"), "--more"])
    assert status == {"proven": 0, "coupled": 1}[loss]
    check_nothing_was_taken(tmp_path)


def test_a_script_that_ends_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([str(written(tmp_path, ends="raise SystemExit(0)"))]) == 2
    assert "has ended before" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "status"), [("proven", 0), ("coupled", 1), ("crashes", 2)])
def test_the_command(tmp_path: Path, loss: str, status: int) -> None:
    script = written(tmp_path, loss)
    command = [
        sys.executable,
        "-m",
        "fastclip.doctor",
        str(script),
        str(tmp_path / "said"),
        "--more",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    check_nothing_was_taken(tmp_path)

"""install(): `import opacus` gives this engine's classes, in a process of its own for each test."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fastclip.opacus.__main__ import main

ROOT = Path(__file__).resolve().parents[2]
TRAIN = """
loader = DataLoader(TensorDataset(torch.randn(40, 6), torch.randint(3, (40,))), batch_size=8)
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
engine = PrivacyEngine()
model, optimizer, loader = engine.make_private(
    module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader,
    noise_multiplier=1.0, max_grad_norm=1.0)
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
IMPORTS = """
import torch, fastclip, fastclip.opacus
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
"""


def run(code: str, *, fails: bool = False) -> str:
    """What a program prints, or how its error ends."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode != 0) is fails, done.stderr
    return done.stderr.strip().splitlines()[-1] if fails else done.stdout.strip()


def test_names_that_were_imported_before() -> None:
    """They are the engine's, in the module that has imported them, and Opacus' again after that."""
    code = f"""
import opacus
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
{IMPORTS}
theirs = PrivacyEngine, DPOptimizer, opacus.GradSampleModule, BatchMemoryManager
fastclip.opacus.install()
from opacus.grad_sample.grad_sample_module import GradSampleModule
from opacus.optimizers.optimizer import DPOptimizer as Again
assert issubclass(PrivacyEngine, fastclip.FastPrivacyEngine), PrivacyEngine
assert DPOptimizer is Again is fastclip.engine.by_hand.DPOptimizer
assert GradSampleModule is opacus.GradSampleModule is fastclip.opacus.GradSampleModule
assert BatchMemoryManager is fastclip.BatchMemoryManager
{TRAIN}
assert isinstance(model, opacus.GradSampleModule) and isinstance(optimizer, DPOptimizer)
assert len(engine.accountant) == 1
fastclip.opacus.uninstall()
import opacus.privacy_engine
assert (PrivacyEngine, DPOptimizer, opacus.GradSampleModule, BatchMemoryManager) == theirs
assert opacus.privacy_engine.PrivacyEngine is theirs[0] and not fastclip.opacus.installed()
print("done")
"""
    assert run(code) == "done"


def test_the_loss_inside_of_a_model() -> None:
    """It is per sample where install() says so, and the program does not."""
    code = f"""
{IMPORTS}
fastclip.opacus.install(model_loss="per_sample")
from opacus import PrivacyEngine
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)
    def forward(self, x, y):
        return nn.functional.cross_entropy(self.net(x).flatten(0, 1), y.flatten())
model, x = Own(), torch.randn(2, 3, 6)
y = torch.tensor([[0, 1, 2], [1, -100, -100]])
private, _, _ = PrivacyEngine().make_private(
    module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
    data_loader=DataLoader(TensorDataset(torch.zeros(40, 1)), batch_size=8), max_grad_norm=1.0)
found = private(x, y).item()
from fastclip.losses import per_sample_cross_entropy
wanted = per_sample_cross_entropy(model.net(x), y).mean().item()
assert abs(found - wanted) < 1e-6, (found, wanted)
print("done")
"""
    assert run(code) == "done"


def test_defaults_of_a_strategy() -> None:
    """They hold where the program names none."""
    code = f"""
{IMPORTS}
fastclip.opacus.install(clipping="automatic", gamma=0.0)
from opacus import PrivacyEngine
{TRAIN}
kinds = [optimizer.grad_state.clipping.strategy.kind]
model.cleanup()
model, optimizer, _ = PrivacyEngine().make_private(
    module=model._module, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=DataLoader(
        TensorDataset(torch.randn(40, 6)), batch_size=8), noise_multiplier=1.0, max_grad_norm=1.0,
    clipping="flat")
print(kinds[0] != optimizer.grad_state.clipping.strategy.kind)
"""
    assert run(code) == "True"


def test_opacus_own_modes_are_still_there() -> None:
    """FastPrivacyEngine's grad_sample_mode="hooks" makes Opacus' optimizers."""
    code = f"""
{IMPORTS}
fastclip.opacus.install()
from fastclip import FastPrivacyEngine as PrivacyEngine
{TRAIN.replace("max_grad_norm=1.0)", "max_grad_norm=1.0, grad_sample_mode='hooks')")}
print(hasattr(optimizer, "grad_state"), len(engine.accountant))
"""
    assert run(code) == "False 1"


@pytest.mark.parametrize(
    ("before", "told"),
    [
        ("class Mine(opacus.GradSampleModule): pass", "Mine was derived"),
        ("made = opacus.GradSampleModule(torch.nn.Linear(2, 2))", "GradSampleModule was made"),
        ("made = opacus.PrivacyEngine()", "PrivacyEngine was made"),
    ],
)
def test_what_would_go_on_with_opacus_is_named(before: str, told: str) -> None:
    code = f"import opacus, torch\n{before}\nimport fastclip.opacus\nfastclip.opacus.install()"
    error = run(code, fails=True)
    assert told in error
    assert "StepError" in error


def test_keywords_that_nobody_takes() -> None:
    code = "import fastclip.opacus\nfastclip.opacus.install(gamma=0.0)"
    assert "gamma" in run(code, fails=True)


SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from opacus import PrivacyEngine
{train}
print(type(engine).__module__.split(".")[0], sys.argv[1:], __name__)
"""


@pytest.mark.parametrize("as_module", [False, True])
def test_a_program_that_is_not_changed(as_module: bool, tmp_path: Path) -> None:
    (tmp_path / "train_it.py").write_text(SCRIPT.format(train=TRAIN))
    program = ["-m", "train_it"] if as_module else ["train_it.py"]
    command = [sys.executable, "-W", "ignore", "-m", "fastclip.opacus", *program, "--epochs", "3"]
    paths = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "FASTCLIP_BUILD": "0"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=paths)
    assert done.stdout.strip() == "fastclip ['--epochs', '3'] __main__", done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "no program"),
        (["--set", "gamma", "x.py"], "NAME=VALUE"),
        (["--other", "x.py"], "no program"),
    ],
)
def test_a_command_that_names_no_program(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err

"""Patterns of programs around Opacus, as they are written, after install()."""

from __future__ import annotations

from tests.opacus.test_install import IMPORTS, run

PARTS = f"""
{IMPORTS}
fastclip.opacus.install()
import opacus
from opacus.accountants import RDPAccountant
from opacus.utils.batch_memory_manager import BatchMemoryManager
"""


def test_two_engines_in_a_process() -> None:
    """Each accounts for its own model."""
    code = f"""
{PARTS}
found = []
for steps in (1, 3):
    model = nn.Linear(6, 3)
    engine = opacus.PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
        max_grad_norm=1.0, data_loader=DataLoader(TensorDataset(torch.randn(40, 6)), batch_size=8))
    for _, (x,) in zip(range(steps), loader):
        optimizer.zero_grad()
        model(x).square().sum(1).mean().backward()
        optimizer.step()
    found.append((engine, model))
print([sum(n for *_, n in engine.accountant.history) for engine, _ in found])
"""
    assert run(code) == "[1, 3]"


def test_an_engine_that_is_subclassed() -> None:
    """Its own _prepare_optimizer is called."""
    code = f"""
{PARTS}
class Engine(opacus.PrivacyEngine):
    def _prepare_optimizer(self, *args, **options):
        made = super()._prepare_optimizer(*args, **options)
        made.attach_step_hook(lambda optimizer: print("step"))
        return made
model = nn.Linear(6, 3)
private, optimizer, loader = Engine().make_private(
    module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
    max_grad_norm=1.0, data_loader=DataLoader(TensorDataset(torch.randn(8, 6)), batch_size=8),
    poisson_sampling=False)
for (x,) in loader:
    private(x).square().sum(1).mean().backward()
    optimizer.step()
"""
    assert run(code) == "step"


def test_a_memory_manager_over_an_optimizer_by_hand() -> None:
    """Steps are counted by the hook that the program attaches, one a logical batch."""
    code = f"""
{PARTS}
model = nn.Linear(6, 3)
data = DataLoader(TensorDataset(torch.randn(40, 6)), batch_size=8)
wrapped = opacus.GradSampleModule(model)
optimizer = opacus.optimizers.DPOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
    expected_batch_size=8)
accountant = RDPAccountant()
optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=0.2))
with BatchMemoryManager(data_loader=data, max_physical_batch_size=4, optimizer=optimizer) as parts:
    for (x,) in parts:
        optimizer.zero_grad()
        wrapped(x).square().sum(1).mean().backward()
        optimizer.step()
print(accountant.history)
"""
    assert run(code) == "[(1.0, 0.2, 5)]"


def test_what_opacus_has_pickled_is_named() -> None:
    """Unpickled after install(), it would be an object of this engine's without its state."""
    code = f"""
{IMPORTS}
import gc, pickle
import opacus
from opacus.optimizers import DPOptimizer
model = opacus.GradSampleModule(nn.Linear(6, 3))
optimizer = DPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0,
                        max_grad_norm=1.0, expected_batch_size=4)
kept = [pickle.dumps(model), pickle.dumps(optimizer)]
del model, optimizer
gc.collect()
fastclip.opacus.install()
for data in kept:
    try:
        pickle.loads(data)
        print("nothing")
    except fastclip.errors.StepError as error:
        print("was pickled by Opacus" in str(error), end=" ")
"""
    assert run(code).split() == ["True", "True"]

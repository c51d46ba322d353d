"""Trains a workload in one of the modes, one batch per step; `measure` times it in this process."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator

import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from bench.measure import CpuWait, PeakMemory, quartiles
from bench.workloads import BATCHES, CPU_MODES, WARM_UP, WORKLOADS

FEWEST = 2
"""Timed steps of a process, however long they take."""


class Training:
    """A model that a mode trains, a batch a step.

    Where the workload names a physical batch, a step has several: the private modes go through
    BatchMemoryManager, ordinary training adds up the gradients of the same rows.

    Args:
        workload, mode: their names. batch_size: rows of every batch; the workload's own if None.
        physical: rows of a physical batch; the workload's own, or all, if None.
    """

    def __init__(
        self,
        workload: str,
        mode: str,
        batch_size: int | None = None,
        physical: int | None = None,
    ) -> None:
        torch.manual_seed(0)
        task = WORKLOADS[workload]
        size = batch_size or task.batch_size
        rows = min(physical or task.physical or size, size)
        if size % rows:
            raise ValueError(f"physical batches of {rows} rows do not make a batch of {size}")
        self.parts = size // rows
        """Physical batches of a step."""
        self._accumulates = self.parts > 1 and mode == "non_private"
        count = size * BATCHES if self.parts == 1 else size  # of a large batch, one is enough
        x = task.inputs(count)
        model = task.model().train()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.model, self.optimizer, self.criterion, self._loader = CPU_MODES[mode](
            model,
            torch.optim.SGD(trained, lr=task.lr, momentum=task.momentum),
            task.criterion(),
            DataLoader(
                TensorDataset(x, task.targets(x)),
                batch_size=rows if self._accumulates else size,
            ),
        )
        self._rows = rows
        self._batches = self._physical_batches()

    def _physical_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Without end; loaded beforehand, unless the optimizer has to be told of their ends."""
        if self.parts == 1:
            held = list(self._loader)
            while True:
                yield from held
        while self._accumulates:
            yield from self._loader
        while True:
            with BatchMemoryManager(
                data_loader=self._loader,
                max_physical_batch_size=self._rows,
                optimizer=self.optimizer,
            ) as batches:
                yield from batches

    def step(self) -> float:
        """One step on the next batch; the loss of its last physical batch."""
        for part in range(self.parts):
            x, y = next(self._batches)
            if not (self._accumulates and part):
                self.optimizer.zero_grad()
            output = self.model(x)
            # transformers return an object
            loss = self.criterion(getattr(output, "logits", output), y)
            if self._accumulates:
                loss = loss / self.parts  # means of rows; private sums are divided by B in the step
            loss.backward()
            if not self._accumulates or part == self.parts - 1:
                self.optimizer.step()
        return loss.item()


def measure(
    workload: str,
    mode: str,
    steps: int,
    threads: int | None = None,
    seconds: float = float("inf"),
) -> dict:
    """Warm up, then time `steps` steps, or as many as are begun within `seconds`.

    Slow modes warm up once and are timed `FEWEST` times at least.

    Returns:
        step_s: first quartile, median and third quartile of a step in seconds. steps: how many.
        peak_mib: peak resident memory above what the process held once model, data, optimizer
            and engine were built, MiB; built_mib: what it held then.
        cpu_wait: share of the time in which some process waited for a core, or None.
    """
    warnings.filterwarnings("ignore")
    if threads is not None:
        torch.set_num_threads(threads)
    training = Training(workload, mode)
    memory = PeakMemory()
    wait = CpuWait()
    begin = time.perf_counter()
    for i in range(WARM_UP):
        if i and time.perf_counter() - begin > seconds:
            break
        training.step()
    taken: list[float] = []
    while len(taken) < min(FEWEST, steps) or (len(taken) < steps and sum(taken) < seconds):
        start = time.perf_counter()
        loss = training.step()
        taken.append(time.perf_counter() - start)
    return {
        "step_s": quartiles(taken),
        "steps": len(taken),
        "peak_mib": memory.above_start() / 2**20,
        "built_mib": memory.start / 2**20,
        "cpu_wait": wait.share(),
        "memory_method": memory.method,
        "loss": loss,
        "threads": torch.get_num_threads(),
    }

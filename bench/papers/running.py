"""Many runs, a few at once: planned, resumed, and told to the results."""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from bench.measure import machine, now, versions
from bench.papers.data.dataset import Dataset
from bench.papers.experiments import EXPERIMENTS
from bench.papers.settings import Experiment
from bench.papers.store import COLUMNS, Store
from bench.papers.strategies import NON_PRIVATE
from bench.papers.training import Run, Trainer

SYNTHETIC = "synthetic"
"""In place of a folder: data are generated."""


def plan(
    experiment: Experiment, strategies: Sequence[str], epsilons: Sequence[float | None],
    seeds: int, epochs: int | None,
) -> list[Run]:  # fmt: skip
    """Runs by seed, so that results stay balanced however far they get; non-private ones once."""
    runs = []
    for seed in range(seeds):
        for strategy in strategies:
            budgets: Sequence[float | None] = (None,) if strategy == NON_PRIVATE else epsilons
            own = experiment.training(None if strategy == NON_PRIVATE else strategy).epochs
            other = None if epochs == own else epochs  # one name for one run
            runs += [Run(experiment.name, strategy, e, seed, other) for e in budgets]
    return runs


@functools.lru_cache(maxsize=2)
def read(experiment: str, folder: str | None) -> Dataset:
    """The data of an experiment, once a process."""
    of = EXPERIMENTS[experiment]
    if folder != SYNTHETIC or of.generate is None:
        return of.load(None if folder in (None, SYNTHETIC) else Path(str(folder)))
    with tempfile.TemporaryDirectory() as made:
        of.generate(Path(made))
        return of.load(Path(made))


def describe(
    experiment: Experiment, data: Dataset, strategies: Sequence[str], epochs: int | None
) -> dict[str, Any]:
    """What an experiment's results come from, for the store."""
    return {
        "title": experiment.title, "paper": experiment.paper, "data": data.name,
        "synthetic": data.synthetic, "split": dict(data.split),
        "notes": [*experiment.notes, *data.notes],
        "attributes": {name: list(groups) for name, groups in data.attributes.items()},
        "classes": list(data.classes), "settings": experiment.told(data, epochs),
        "strategies": experiment.told_of(strategies, data, epochs),
    }  # fmt: skip


def origin(command: str) -> dict[str, Any]:
    """Which command makes results, where and with what."""
    return {"command": command, "date": now(), "machine": machine(), "versions": versions()}


def execute(
    runs: Sequence[Run], folder: str | None, store: Store, jobs: int, show: bool = True
) -> list[str]:
    """Make the runs that are not done yet, `jobs` at once.

    Returns:
        A sentence for each run that failed; the others are in the store.
    """
    done = store.done()
    left = [run for run in runs if run.key not in done]
    context = multiprocessing.get_context("spawn")
    ticks = context.SimpleQueue()
    failed: list[str] = []
    total = sum(_epochs(run) for run in left)
    bar = tqdm(total=total, unit="epoch", disable=not show, desc=f"{len(left)} runs")
    listener = threading.Thread(target=_listen, args=(ticks, bar), daemon=True)
    listener.start()
    with ProcessPoolExecutor(
        jobs, mp_context=context, initializer=_start, initargs=(ticks,)
    ) as pool:
        tasks = {pool.submit(one, run, folder, store.folder): run for run in left}
        for task in as_completed(tasks):
            error = task.exception()
            if error is not None:
                failed.append(f"{tasks[task].key}: {type(error).__name__}: {error}")
                bar.write(failed[-1])
    ticks.put(None)
    listener.join()
    bar.close()
    return failed


def one(run: Run, folder: str | None, out: Path) -> None:
    """One run in a process of its own, from where it was killed."""
    store = Store(out)
    with store.held(run.key):
        if run.key in store.done():
            return
        checkpoint = store.checkpoint(run.key)
        start = time.perf_counter()
        told = 0

        def tick(epochs: int) -> None:
            nonlocal told
            _ticks.put(epochs - told)
            told = epochs

        try:
            data = read(run.experiment, folder)
            trainer = Trainer(EXPERIMENTS[run.experiment], run, data)
            frame = trainer.train(checkpoint, tick)
        except Exception as error:  # what a process raises may not be picklable
            raise RuntimeError(f"{error} ({traceback.format_exc(limit=-2)})") from None
        store.add(run.key, rows(run, trainer, data, frame, time.perf_counter() - start))
        checkpoint.unlink(missing_ok=True)


def rows(run: Run, trainer: Trainer, data: Dataset, frame: pd.DataFrame, s: float) -> pd.DataFrame:
    """The recorder's table, and what the run was, as rows of the results."""
    private = trainer.engine is not None
    facts = {
        "steps": trainer.steps, "seconds": s, "rows": len(data.train),
        "lr": trainer.optimizer.param_groups[0]["lr"],
    }  # fmt: skip
    if trainer.engine is not None:
        facts["epsilon"] = trainer.engine.get_epsilon(trainer.experiment.delta)
    own = pd.DataFrame(
        {"part": "run", "step": trainer.step, "attribute": "run", "group": "all",
         "measure": list(facts), "value": [float(v) for v in facts.values()],
         "private": [private and name not in ("seconds", "rows") for name in facts]}
    )  # fmt: skip
    found = pd.concat([frame.rename(columns={"epsilon": "epsilon_spent"}), own], ignore_index=True)
    found = found.assign(
        run=run.key, experiment=run.experiment, data=data.name, synthetic=data.synthetic,
        strategy=run.strategy, epsilon=run.epsilon, seed=run.seed,
    )  # fmt: skip
    return found[list(COLUMNS)]


def _epochs(run: Run) -> int:
    of = EXPERIMENTS[run.experiment]
    strategy = None if run.strategy == NON_PRIVATE else run.strategy
    return run.epochs or of.training(strategy).epochs


def _listen(ticks: Any, bar: tqdm) -> None:
    while (told := ticks.get()) is not None:
        bar.update(told)


_ticks: Any = None
"""Of a worker: where it tells the epochs it has done."""


def _start(ticks: Any) -> None:
    """Of a worker: one thread, for the tensors are small; no warnings of every start; no life alone."""
    global _ticks
    _ticks = ticks
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    threading.Thread(target=_follow, daemon=True).start()


def _follow() -> None:
    """End with the parent, also where that was killed: its command may be started again at once."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

"""A hyperparameter search whose whole cost is known: random trials, their number random and secret.

Papernot & Steinke 2022, Theorem 2, as Zhao et al. 2025 use it: the number K of runs is drawn once from
a truncated negative binomial distribution; each run draws its learning rate and C_LB from the papers'
grids, independently; its score, the number of validation rows that it gets right, is told with Gaussian
noise; the best run by that score is released with its model, and nothing of any other: neither K, nor
a score; nor, of the best, the seed of its noise. Rows of validation are no rows of training, so a
person's share in one run is either the training's cost or the score's, and the search pays for the
larger of the two at each Renyi order. The split counts as fixed: neighbours differ in a row of a part.
To train once more with what was found costs once more.

What the search needs to go on after it was killed lies in a folder of its own, is secret, and is
deleted at the end. Whoever watches how long a search takes learns something about K.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from bench.measure import machine, now, versions
from bench.papers.data.dataset import Dataset, Rows
from bench.papers.experiments import EXPERIMENTS
from bench.papers.running import SYNTHETIC, read
from bench.papers.settings import Experiment
from bench.papers.store import Store, write
from bench.papers.training import Run, Trainer
from fastclip import FastPrivacyEngine
from fastclip.accounting import (
    TruncatedNegativeBinomial,
    TunedEpsilon,
    find_noise_multiplier,
    hpo_epsilon,
)
from fastclip.counts import CountQuery, PrivateData
from fastclip.errors import ArgumentError

LEARNING_RATES = tuple(np.logspace(0, 1, 10).tolist())
LOWER_BOUNDS = tuple(np.logspace(np.log10(0.001), np.log10(50), 20).tolist())
"""The grids of Zhao et al. 2025, Tables 3 and 4."""
HELD_OUT = 0.2
"""Share of the training rows that become validation rows where a data set has none."""
VALIDATION = PrivateData("validation", overlap=())
_PRIVATE = random.SystemRandom()


def search(options: argparse.Namespace) -> str:
    """Make the trials that are left; what is released, as text.

    The result is also written to search-NAME.json in the folder of results.
    """
    folder = SYNTHETIC if options.synthetic else options.data and str(options.data)
    experiment = EXPERIMENTS[options.name]
    data = with_validation(read(options.name, folder))
    trials = TruncatedNegativeBinomial.from_mean(options.mean_trials, options.eta)
    store = Store(options.out)
    path = options.out / f"search-{options.name}.json"
    with store.held(path.stem):
        if path.exists():
            for left in store.folder.glob(f"{path.stem}-{'[0-9a-f]' * 12}.secret"):
                shutil.rmtree(left)  # of one that was killed as it ended
            raise ArgumentError(
                f"{path} holds what an earlier search released; another search costs its own epsilon "
                "on top of that one's: pass another folder with --out, and add the two"
            )
        cost, score_noise = price(experiment, options, data, trials)
        secret = Secret(store.folder, options, data, trials)
        # On a terminal alone, from the start for every trial: a log would tell how many there were.
        epochs = options.epochs or experiment.training(options.strategy).epochs
        with tqdm(total=epochs, unit="epoch", desc="a trial", disable=None) as bar:
            while (trial := secret.next()) is not None:
                bar.reset()
                scored(trial, secret, experiment, data, score_noise, bar)
        return release(path, options, data, trials, secret, cost, score_noise)


def release(
    path: Path, options: argparse.Namespace, data: Dataset, trials: TruncatedNegativeBinomial,
    secret: Secret, cost: TunedEpsilon, score_noise: float,
) -> str:  # fmt: skip
    """Write what may be known of the best trial, and forget the others; in words."""
    best, model = secret.best()
    write(path.with_suffix(".pt"), model)
    delta = EXPERIMENTS[options.name].delta
    result = {
        "experiment": options.name, "data": data.name, "synthetic": data.synthetic,
        "strategy": options.strategy, "released": best, "epsilon": cost.epsilon,
        "epsilon_of_one_run": cost.base_epsilon, "order": cost.order, "delta": delta,
        "trials": {"mean": trials.mean, "eta": trials.eta, "gamma": trials.gamma},
        "score_noise": score_noise, "validation_rows": len(_validation(data)), "date": now(),
        "machine": machine(), "versions": versions(),
        "covered": "lr, lower, score and the model; test accuracies look at held out rows without noise",
    }  # fmt: skip
    write(path, (json.dumps(result, indent=1) + "\n").encode())
    secret.forget()
    return (
        f"released: lr {best['lr']:.4g}, C_LB {best['lower']:.4g}, noisy validation accuracy "
        f"{best['score'] / len(_validation(data)):.3f}\n"
        f"epsilon of the whole search {cost.epsilon:.3f} at delta {delta:g} "
        f"(one run alone {cost.base_epsilon:.3f}; {trials.mean:.3g} runs expected)\n"
        f"written: {path}, {path.with_suffix('.pt')}"
    )


def price(
    experiment: Experiment, options: argparse.Namespace, data: Dataset,
    trials: TruncatedNegativeBinomial,
) -> tuple[TunedEpsilon, float]:  # fmt: skip
    """Epsilon of the search, and the standard deviation of a score's noise.

    All trials have the same noise multiplier, rate and number of steps: a learning rate and C_LB
    change none of them. The score of a run is a Gaussian mechanism with the budget of the run.
    """
    trainer = Trainer(experiment, _run(options, seed=0, lr=1.0, lower=1.0), data)
    assert trainer.engine is not None
    schedule = trainer.optimizer.grad_state.clipping.strategy.noise
    rate = 1 / len(trainer.loader)
    sigma = float(trainer.optimizer.noise_multiplier)
    records = [(sigma * factor, rate, steps) for factor, steps in schedule.runs(trainer.steps)]
    score_noise = find_noise_multiplier(
        target_epsilon=options.epsilon, target_delta=experiment.delta, sample_rate=1.0, steps=1
    )
    score = [(score_noise, 1.0, 1)]
    return hpo_epsilon(records, experiment.delta, trials, others=[score]), score_noise


class Secret:
    """What a search must remember and never show: K, its trials and their scores."""

    def __init__(
        self, out: Path, options: argparse.Namespace, data: Dataset,
        trials: TruncatedNegativeBinomial,
    ) -> None:  # fmt: skip
        asked = {
            name: str(value) for name, value in sorted(vars(options).items())
            if name not in ("out", "data")
        }  # fmt: skip
        told = json.dumps([asked, dict(data.split)], sort_keys=True)
        key = hashlib.sha256(told.encode()).hexdigest()[:12]
        self.folder = out / f"search-{options.name}-{key}.secret"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._file = self.folder / "trials.json"
        self._options = options
        if self._file.exists():
            self.trials: list[dict[str, Any]] = json.loads(self._file.read_text())
            return
        self.trials = [
            {
                "lr": _PRIVATE.choice(LEARNING_RATES), "lower": _PRIVATE.choice(LOWER_BOUNDS),
                "seed": _PRIVATE.getrandbits(48), "score": None,
            }
            for _ in range(trials.sample())
        ]  # fmt: skip
        self.keep()

    def keep(self) -> None:
        """Write what is known."""
        write(self._file, json.dumps(self.trials).encode())

    def next(self) -> dict[str, Any] | None:
        """A trial that has no score yet."""
        return next((trial for trial in self.trials if trial["score"] is None), None)

    def run(self, trial: dict[str, Any]) -> Run:
        """What the trial runs."""
        return _run(self._options, seed=trial["seed"], lr=trial["lr"], lower=trial["lower"])

    def checkpoint(self, trial: dict[str, Any]) -> Path:
        """Where the trial keeps itself."""
        return self.folder / f"{self.trials.index(trial)}.checkpoint"

    def model(self, trial: dict[str, Any]) -> Path:
        """Where the trained model of the trial waits."""
        return self.folder / f"{self.trials.index(trial)}.pt"

    def best(self) -> tuple[dict[str, Any], bytes]:
        """What is released of the best trial (of equal scores the first), and its model.

        Never its seed, from which its noise follows.
        """
        best = max(self.trials, key=lambda trial: trial["score"])
        shown = {name: best[name] for name in ("lr", "lower", "score", "test")}
        return shown, self.model(best).read_bytes()

    def forget(self) -> None:
        """The search is over."""
        shutil.rmtree(self.folder)


def scored(
    trial: dict[str, Any], secret: Secret, experiment: Experiment, data: Dataset,
    score_noise: float, bar: tqdm,
) -> None:  # fmt: skip
    """Train the trial and keep its noisy score and what would be released of it."""
    trainer = Trainer(experiment, secret.run(trial), data)
    checkpoint = secret.checkpoint(trial)
    frame = trainer.train(checkpoint, lambda epoch: bar.update(1 if epoch else 0))
    validation = _validation(data)
    _, found = trainer.outputs(validation)
    last = frame[(frame["step"] == trainer.step) & (frame["part"] == "test")]
    measures = ("accuracy", "macro_accuracy", "worst_class_accuracy")
    overall = last[(last["attribute"] == "all") & last["measure"].isin(measures)]
    trial["test"] = dict(zip(overall["measure"], overall["value"].astype(float), strict=True))
    weights = io.BytesIO()
    torch.save(trainer.network.state_dict(), weights)
    write(secret.model(trial), weights.getvalue())
    # Drawn once, kept with it. What all scores cost is the search's to say, so this ledger is dropped.
    query = CountQuery(VALIDATION, ("all",), score_noise, "row", measures=("correct",))
    answer = FastPrivacyEngine(secure_mode=True).count(
        query, groups=torch.zeros_like(validation.y), measures={"correct": found == validation.y}
    )
    trial["score"] = round(answer.count("all", "correct"))
    secret.keep()
    checkpoint.unlink(missing_ok=True)


def with_validation(data: Dataset, share: float = HELD_OUT) -> Dataset:
    """The data with a validation part: its own, or a share of its training rows."""
    if data.validation is not None:
        return data
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
    cut = int(len(order) * share)
    split = {**data.split, "validation": f"{share:g} of the training rows, by seed 0"}
    return replace(
        data, validation=_take(data.train, order[:cut]), train=_take(data.train, order[cut:]),
        split=split,
    )  # fmt: skip


def _take(rows: Rows, chosen: torch.Tensor) -> Rows:
    groups = {name: of[chosen] for name, of in rows.groups.items()}
    return Rows(tuple(x[chosen] for x in rows.x), rows.y[chosen], groups)


def _validation(data: Dataset) -> Rows:
    assert data.validation is not None
    return data.validation


def _run(options: argparse.Namespace, *, seed: int, lr: float, lower: float) -> Run:
    return Run(
        options.name, options.strategy, options.epsilon, seed, options.epochs, lr=lr, lower=lower
    )

"""The papers' experiments: `python -m bench.papers list | run | search | report`.

    python -m bench.papers run                              # digits and breast cancer, no files needed
    python -m bench.papers run adult-xu --data FOLDER --seeds 5 --epsilon 1 3 8
    python -m bench.papers run mimic --synthetic --seeds 1  # generated data of the same schema
    python -m bench.papers report                           # tables and pictures of what was run

A run that is killed goes on when the same command is given again.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.papers.experiments import DEFAULT as DEFAULT_EXPERIMENTS
from bench.papers.experiments import EXPERIMENTS
from bench.papers.running import SYNTHETIC, describe, execute, origin, plan, read
from bench.papers.store import Store
from bench.papers.strategies import DEFAULT as DEFAULT_STRATEGIES
from bench.papers.strategies import NON_PRIVATE, STRATEGIES
from bench.processes import ROOT
from fastclip.errors import ArgumentError

OUT = ROOT / "build" / "papers"
FOLDERS = ("--data", "--out")
"""Options that name one; never abbreviated, so that none is overlooked."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.papers", description=__doc__, allow_abbrev=False
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="experiments, what they need, and their strategies")
    run = commands.add_parser("run", help="make runs; what was made is kept",
                              allow_abbrev=False)  # fmt: skip
    run.add_argument("names", nargs="*", metavar="NAME", default=list(DEFAULT_EXPERIMENTS),
                     help=f"experiments; default: {' '.join(DEFAULT_EXPERIMENTS)}")  # fmt: skip
    choices = (*STRATEGIES, "all")
    run.add_argument("--strategy", nargs="+", choices=choices, default=list(DEFAULT_STRATEGIES),
                     metavar="NAME", help="or all; default: those of the papers' claims")  # fmt: skip
    run.add_argument("--seeds", type=_positive(int), default=5, help="runs of each; default 5")
    run.add_argument("--epsilon", nargs="+", type=_positive(float), metavar="E",
                     help="budgets; default: the paper's")  # fmt: skip
    run.add_argument("--paper-sigma", action="store_true",
                     help="the paper's own noise multiplier in place of budgets")  # fmt: skip
    run.add_argument("--epochs", type=_positive(int), help="in place of the paper's number")
    run.add_argument("--jobs", type=_positive(int), default=2, help="runs at once; default 2")
    _data(run)
    report = commands.add_parser("report", help="Markdown and a page of what was run")
    report.add_argument(
        "--out", type=Path, default=OUT, help=f"folder of results; default {OUT.name}"
    )
    search = commands.add_parser("search", help="a private search over learning rate and C_LB",
                                 allow_abbrev=False)  # fmt: skip
    search.add_argument("name", choices=EXPERIMENTS, metavar="NAME")
    search.add_argument(
        "--strategy", choices=STRATEGIES, default="bounded_adaptive", metavar="NAME"
    )
    search.add_argument("--epsilon", type=_positive(float), default=1.0, help="of one run")
    search.add_argument("--mean-trials", type=_positive(float), default=8.0, help="expected runs")
    search.add_argument("--eta", type=float, default=0.0, help="shape of the number of runs, > -1")
    search.add_argument("--epochs", type=_positive(int), help="in place of the paper's number")
    _data(search)
    return parser.parse_args(arguments)


def _data(command: argparse.ArgumentParser) -> None:
    command.add_argument("--data", type=Path, metavar="FOLDER", help="folder of the real files")
    command.add_argument(
        "--synthetic", action="store_true", help="generated data of the same schema"
    )
    command.add_argument("--out", type=Path, default=OUT, help="folder of results")


def _positive(kind: type) -> type:
    def read(text: str) -> float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
        return value

    read.__name__ = f"positive {kind.__name__}"
    return read  # type: ignore[return-value]


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; 1 where a run failed."""
    options = parse(arguments)
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = "python -m bench.papers " + shlex.join(_without_folder(words))
    try:
        if options.command == "list":
            print(listing())
            return 0
        if options.command == "report":
            from bench.papers.report import write_report

            print(f"written: {', '.join(str(path) for path in write_report(Store(options.out)))}")
            return 0
        if options.command == "search":
            from bench.papers.search import search

            print(search(options))
            return 0
        return run(options, command)
    except ArgumentError as error:
        print(f"python -m bench.papers: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace, command: str) -> int:
    """Every experiment that was named, one after another."""
    unknown = [name for name in options.names if name not in EXPERIMENTS]
    if unknown:
        raise ArgumentError(
            f"no experiment {', '.join(unknown)}; there are: {', '.join(EXPERIMENTS)}"
        )
    strategies = list(STRATEGIES) if "all" in options.strategy else options.strategy
    store = Store(options.out)
    folder = SYNTHETIC if options.synthetic else options.data and str(options.data)
    failed: list[str] = []
    for name in options.names:
        experiment = EXPERIMENTS[name]
        data = read(name, folder)  # before anything else: what is missing is said at once
        store.note(name, describe(experiment, data, strategies, options.epochs), origin(command))
        epsilons = list(options.epsilon or experiment.epsilons)
        if options.paper_sigma:
            if experiment.noise_multiplier is None:
                raise ArgumentError(
                    f"the paper of {name} states no noise multiplier; omit --paper-sigma"
                )
            epsilons = [None]
        runs = plan(experiment, [NON_PRIVATE, *strategies], epsilons, options.seeds, options.epochs)
        print(f"{name}: {len(runs)} runs on {data.name}{' (synthetic)' * data.synthetic}")
        failed += execute(runs, folder, store, options.jobs)
        store.merge()
    print(f"results: {store.file}")
    for sentence in failed:
        print(f"FAILED {sentence}", file=sys.stderr)
    return 1 if failed else 0


def listing() -> str:
    """Experiments by paper."""
    lines = []
    for paper in dict.fromkeys(experiment.paper for experiment in EXPERIMENTS.values()):
        lines.append(f"\n{paper}")
        for e in EXPERIMENTS.values():
            if e.paper == paper:
                needs = "no files" if e.generate is None else "--data FOLDER or --synthetic"
                lines.append(f"  {e.name:<22}{e.title}  [{needs}]")
    lines.append(f"\nstrategies: {', '.join(STRATEGIES)}")
    return "\n".join(lines).lstrip()


def _without_folder(words: list[str]) -> list[str]:
    """The command as results show it: folders of this machine are nobody's business."""
    shown: list[str] = []
    for word in words:
        hidden = bool(shown) and shown[-1] in FOLDERS
        flag, equals, _ = word.partition("=")
        shown += (
            ["FOLDER"] if hidden else [flag, "FOLDER"] if equals and flag in FOLDERS else [word]
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())

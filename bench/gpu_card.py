"""Builds, tests and benchmarks a GPU in fifteen minutes, with one command.

    python -m bench.gpu_card --out DIR --minutes 9                   DIR/card.json and DIR/card.log
    python -m bench.gpu_card --out DIR --minutes 5 --from OLD/card.json     resumes with what is left
    python -m bench.gpu_card --out DIR --wheels wheels               with packages that the machine lacks
    python -m bench.gpu_card --out DIR --only kernels --match ghost_norm
    python -m bench.gpu_card --out DIR --rehearse                    without a card: no figures

bench/gpu_card.md lists what to copy there and what comes back. Everything that uses the GPU runs in
separate processes, which are ended at their time limits. card.json is rewritten as results arrive, and
finished parts are not run again. A short table is printed at the end, also after SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from bench.children import write
from bench.deadline import Deadline
from bench.gpu_kernels import compile_ahead, run_kernels
from bench.gpu_machine import COMPILERS, facts, prepare, wheels
from bench.gpu_runs import Runs, rehearsed_plan, step_plan
from bench.gpu_table import table
from bench.gpu_tests import MENDED, run_tests
from bench.measure import machine, now

PARTS = ("mended", "steps", "kernels", "tests")
SHARES = {"ahead": 0.3, "mended": 0.2, "steps": 0.85, "kernels": 1.0, "tests": 1.0}
"""Of the time that is left when a part begins; what it does not use goes to the next."""
RESERVE = 10.0  # seconds kept for ending processes and the table
CASE_SECONDS = 0.5  # of timing a microbenchmark
CORES = 5  # of a process that runs steps: itself, and what compiles for it
RESULTS = Path(__file__).resolve().parent / "results"
REHEARSED = ("bert_t128",)
"""Whose steps inductor compiles in a rehearsal, which takes most of a minute on a CPU; those of others
are traced, and run as they are."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu_card", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True, help="folder of card.json and card.log")
    parser.add_argument("--from", dest="earlier", type=Path, help="card.json of an earlier command")
    parser.add_argument("--minutes", type=float, default=9.0, help="from the process' start")
    parser.add_argument("--wheels", type=Path, default=os.environ.get("FASTCLIP_WHEELS"),
                        help="folder of *.whl that this machine lacks (FASTCLIP_WHEELS)")  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="parts; all")
    parser.add_argument(
        "--match", default="", help="run steps and microbenchmarks with this text in their name"
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU: no figures")
    options = parser.parse_args(arguments)
    options.wheels = None if options.wheels is None else Path(options.wheels)
    if options.minutes <= 0:
        parser.error("--minutes must be positive")
    return options


def without_folders(value: Any) -> Any:
    """Results without this machine's folders, and with None for what JSON has no number for."""
    if isinstance(value, dict):
        return {str(key): without_folders(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"(?<![\w.\-/])/(?:[\w.+\-]+/)+", "", value)
    if isinstance(value, float) and not abs(value) < float("inf"):
        return None
    return value


def measured_before() -> list[str]:
    """Names of the microbenchmarks that a card has run: in bench/results."""
    found: dict[str, None] = {}
    for path in sorted(RESULTS.glob("gpu-*.json")):
        rows = json.loads(path.read_text()).get("kernels", {}).get("rows", [])
        found.update({row["name"]: None for row in rows if "seconds" in row})
    return list(found)


class Card:
    """What is known by now, in DIR/card.json, and what was said, in DIR/card.log.

    Args:
        options: of the command line. clock: the present in seconds. spent: of the time, already.
    """

    def __init__(
        self, options: argparse.Namespace, clock: Callable[[], float] = time.monotonic,
        spent: float = 0.0,
    ) -> None:  # fmt: skip
        self.options, self._clock, self._began = options, clock, clock() - spent
        self.deadline = Deadline(60 * options.minutes - RESERVE - spent, clock)
        self._lock = threading.Lock()
        options.out.mkdir(parents=True, exist_ok=True)
        self.path = options.out / "card.json"
        self._log = (options.out / "card.log").open("a")
        self.result = self._earlier()
        self._before = self.result.get("seconds", 0.0)
        commands = [*self.result.get("commands", []), command(options)]
        self.result |= {"commands": commands, "date": now(), "machine": machine()}

    def _earlier(self) -> dict[str, Any]:
        given = self.path if self.path.exists() else self.options.earlier
        return {} if given is None else json.loads(given.read_text())  # type: ignore[no-any-return]

    def say(self, text: str) -> None:
        """To whoever watches, and to the log."""
        print(text, flush=True)
        self._log.write(f"{now()} {without_folders(text)}\n")
        self._log.flush()

    def save(self) -> None:
        """Everything that is known, to the disk."""
        with self._lock:
            self.result["seconds"] = self._before + self._clock() - self._began
            write(self.path, without_folders(self.result))

    def close(self) -> None:
        """Nothing more is said."""
        self._log.close()


@contextmanager
def _compiling(order: Mapping, count: int) -> Iterator[None]:
    """Meanwhile spare cores compile the microbenchmarks' kernels."""
    with ExitStack() as stack:
        for child in compile_ahead(order, count):
            stack.enter_context(child)
        yield


def measure(card: Card) -> None:
    """Run the parts, each within its share of the time."""
    options, result, rehearsal = card.options, card.result, card.options.rehearse
    device, cores = ("cpu" if rehearsal else "cuda"), os.cpu_count() or 1
    match = options.match

    def begin(part: str) -> Deadline:
        card.say(f"{part}: {card.deadline.left():.0f} s left")
        return card.deadline.part(SHARES[part])

    order = {"device": device, "tiny": rehearsal}
    ahead = COMPILERS if "steps" in options.only and not rehearsal else {}
    prepare(begin("ahead"), order, ahead, result, card.save)
    kernels = {"device": device, "match": match, "small": rehearsal, "last": measured_before(),
               "case_seconds": 0.01 if rehearsal else CASE_SECONDS}  # fmt: skip
    if "mended" in options.only and MENDED and "error" in result.get("mended", {"error": ""}):
        wanted = "kernels" in options.only and not rehearsal
        with _compiling(kernels, min(6, cores // 2) if wanted else 0):
            run_tests(begin("mended"), result, card.save, "mended", MENDED)
    if "steps" in options.only:
        order |= {"steps": 2 if rehearsal else 10, "inductor": REHEARSED if rehearsal else None}
        lanes = 1 if rehearsal else max(min(3, cores // CORES), 1)
        runs = Runs(begin("steps"), order, result, card.save, card.say, lanes)
        plan = rehearsed_plan() if rehearsal else step_plan()
        runs.run([unit for unit in plan if match in " ".join(unit[1:])])
    if "kernels" in options.only:
        run_kernels(begin("kernels"), kernels, result, card.save)
    if "tests" in options.only and not rehearsal and "error" in result.get("tests", {"error": ""}):
        run_tests(begin("tests"), result, card.save)


def went_wrong(result: Mapping) -> bool:
    """Whether a test failed, or an operation or a fastclip step was wrong or failed."""
    kernels, runs = result.get("kernels", {}), result.get("steps", {}).get("runs", [])
    tests = [result.get(part, {}) for part in ("mended", "tests")]
    if result["rehearsal"]:  # there are no graphs on a CPU
        runs = [run for run in runs if run["way"] != "graph"]
    return bool(
        any(found.get("failed") or found.get("errors") for found in tests)
        or any("error" in row for row in kernels.get("rows", []))
        or any("error" in run and not run.get("stopped") for run in runs if run["mode"] == "fastclip")
    )  # fmt: skip


@contextmanager
def unset(*names: str) -> Iterator[None]:
    """Without these environment variables, for this process and those that it starts."""
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


class Ended(BaseException):
    """Raised when this program gets SIGTERM."""


def _end(*_: Any) -> None:
    raise Ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes card.json and prints the table; returns 0 if all went well."""
    options = parse(arguments)
    if arguments is None:
        signal.signal(signal.SIGTERM, _end)
    names = () if options.rehearse else ("TRITON_INTERPRET", "FASTCLIP_BACKEND")
    with unset(*names), wheels(options.wheels) as trouble:  # figures are of what users get
        spent = time.time() - psutil.Process().create_time() if arguments is None else 0.0
        return run(Card(options, spent=spent), trouble)


def run(card: Card, trouble: str | None = None) -> int:
    """What :func:`main` does in the environment that it has prepared.

    Args:
        trouble: the problem with the wheels.
    """
    result, rehearsal = card.result, card.options.rehearse
    earlier = result.get("card")
    found = facts("cpu" if rehearsal else "cuda")
    result["problems"] = [*([trouble] if trouble else []), *found.pop("problems")]
    if earlier not in (None, found.get("card")) and not result["problems"]:
        result["problems"].append(
            f"card.json is of {earlier}, but this is {found['card']}: name another folder"
        )
    else:
        result |= {**found, "rehearsal": rehearsal}
        result.pop("ended", None)
        if not result["problems"]:
            try:
                card.save()
                measure(card)
            except (Ended, KeyboardInterrupt) as ended:
                result["ended"] = f"{type(ended).__name__} before it was done"
        card.save()
    card.say(table(without_folders(result)))
    card.close()
    return 2 if result["problems"] else int("ended" in result or went_wrong(result))


def command(options: argparse.Namespace) -> str:
    """What was asked for, without this machine's folders."""
    text = f"python -m bench.gpu_card --minutes {options.minutes:g}"
    if set(options.only) != set(PARTS):
        text += f" --only {' '.join(options.only)}"
    text += f" --match {options.match}" if options.match else ""
    return f"{text} --rehearse" if options.rehearse else text


if __name__ == "__main__":
    raise SystemExit(main())

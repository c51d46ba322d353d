"""The table of docs/clients.md: `python -m bench.clients.table FILE.json [--page docs/clients.md]`.

Times are CPU seconds: the least over the rounds of a run's median step, and of whole runs;
fastclip's over
Opacus'. The machine is shared, and others' load moves a wall clock far more.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

HEAD = (
    "| program | version | what runs | epsilon | step | whole run | memory | what differs, and why |\n"
    "|---|---|---|---|---:|---:|---:|---|"
)


BEGIN, END = "<!-- table -->\n", "<!-- /table -->"


def least(runs: list[dict], *path: str) -> float | None:
    """The least of a number over the rounds that have it."""
    found = []
    for run in runs:
        value: object = run
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if isinstance(value, (int, float)):
            found.append(float(value))
    return min(found) if found else None


def ratio(entry: dict, *path: str) -> float | None:
    """fastclip's over Opacus'."""
    ours, theirs = (least(entry[engine], *path) for engine in ("fastclip", "opacus"))
    return None if ours is None or not theirs else ours / theirs


def failure(runs: list[dict]) -> str | None:
    """Why it did not run, in one line of the table."""
    error = next((run["error"] for run in runs if "error" in run), None)
    return None if error is None else error.replace("|", "\\|").replace("\n", " ")


def epsilon(entry: dict) -> str:
    """Opacus' and fastclip's; one where they are the same to the last digit shown."""
    shown = [
        "-" if (e := least(entry[k], "epsilon")) is None else f"{e:.2f}"
        for k in ("opacus", "fastclip")
    ]
    return shown[0] if shown[0] == shown[1] else f"{shown[0]}, {shown[1]}"


def line(entry: dict) -> str:
    """One program."""
    about, notes = entry["about"], []
    for engine, name in (("opacus", "Opacus"), ("fastclip", "fastclip")):
        if (error := failure(entry[engine])) is not None:
            notes.append(f"with {name}: `{error}`")
    if about["note"]:
        notes.append(about["note"])
    numbers = [ratio(entry, *path) for path in (("step", "cpu"), ("run", "cpu"), ("memory_mib",))]
    cells = [
        about["title"], about["version"], about["runs"], epsilon(entry),
        *("-" if number is None else f"{number:.2f}" for number in numbers), ". ".join(notes),
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def table(results: dict) -> str:
    """In the order of the file."""
    return "\n".join([HEAD, *map(line, results["programs"].values())])


def written(page: str, results: dict) -> str:
    """The page with this table between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}{table(results)}\n{END}{rest.partition(END)[2]}"


def main() -> None:
    """Print it, or put it into the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.clients.table")
    parser.add_argument("results", type=Path)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    results = json.loads(options.results.read_text())
    if options.page is None:
        print(table(results))
    else:
        options.page.write_text(written(options.page.read_text(), results))


if __name__ == "__main__":
    main()

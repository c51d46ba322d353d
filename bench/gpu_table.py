"""The table that bench.gpu_card prints last, at most 76 lines of 170 columns and 11,700 characters.

Many machines show no more than 12,000 characters.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from bench.gpu_runs import GOALS, ORDINARY, PRIVATE, WAY_SECONDS

WIDTH, LINES, MOST, FAILURES, WARNINGS, TROUBLES = 170, 76, 11_700, 5, 3, 10
NAME = 34  # columns of a kernel's name


def table(result: Mapping) -> str:
    """What was measured, as text."""
    rehearsal = "REHEARSAL, no figures of a card: " if result.get("rehearsal") else ""
    lines = [f"{rehearsal}{result.get('card', 'no card')}, {result['date']}"]
    lines += [f"PROBLEM: {problem}" for problem in result["problems"]]
    if not result["problems"]:
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        lines.append(f"{versions}; driver {result.get('driver', '-')}, nvcc {result['nvcc']}")
    lines += _ahead(result)
    for part in ("mended", "tests"):
        if part in result:
            lines += _tests(part, result[part])
    if "steps" in result:
        lines += _steps(result["steps"])
    last = f"{result.get('seconds', 0):.0f} s in all"
    last += f"; {result['ended']}" if "ended" in result else ""
    if "kernels" in result:
        room = max(LINES - len(lines) - 3, 8)  # the last line, and bench.gpu_card's own
        lines += _kernels(result["kernels"], room)
    return "\n".join([*_short(lines, MOST - len(last)), last])


def _short(lines: Sequence[str], most: int) -> list[str]:
    """As many of the lines as are allowed."""
    kept: list[str] = []
    for line in (line[:WIDTH].rstrip() for line in lines[: LINES - 2]):
        most -= len(line) + 1
        if most < 0:
            break
        kept.append(line)
    return kept


def _ahead(result: Mapping) -> list[str]:
    """What became of fastclip._C and of what was compiled beforehand."""
    lines = []
    if build := result.get("build"):
        seconds = f"{build['seconds']:.0f} s"
        state = f"built in {seconds}" if build["built"] else f"ABSENT: {build['why']} ({seconds})"
        lines.append(f"fastclip._C: {state}")
    if ahead := result.get("ahead"):
        failed = [f"{row['task']} {row['error']}" for row in ahead if "error" in row]
        longest = max((row.get("seconds", 0.0) for row in ahead), default=0.0)
        text = f"compiled ahead: {len(ahead) - len(failed)} of {len(ahead)} in {longest:.0f} s"
        lines.append(f"{text}; {'; '.join(failed)}" if failed else text)
    return lines


def _tests(part: str, tests: Mapping) -> list[str]:
    counts = ", ".join(
        f"{tests[name]} {name}" for name in ("passed", "failed", "errors", "skipped")
    )
    lines = [f"{part}: {counts} in {tests['seconds']:.0f} s {tests.get('error', '')}".rstrip()]
    for failure in tests["failures"][:FAILURES]:
        lines.append(f"  {failure['test'].rpartition('/')[2]}: {failure['message']}")
    if len(tests["failures"]) > FAILURES:
        lines.append(f"  and {len(tests['failures']) - FAILURES} more in the JSON")
    return lines


def _kernels(kernels: Mapping, room: int) -> list[str]:
    """Ceilings, then as many cases as fit; those that failed or ran elsewhere first."""
    rows = kernels["rows"]
    title = f"kernels: {len(rows)} cases, {kernels.get('not_run', '?')} not run"
    lines = [f"{title} {kernels.get('error', '')}".rstrip()]
    if ceiling := kernels.get("ceiling"):
        rates = ", ".join(f"{t} {_rate(x)}" for t, x in ceiling["matmul_tflops"].items())
        lines[0] += f"; ceilings: {rates} TFLOP/s, copy {_rate(ceiling['copy_gbps'])} GB/s"
    lines.append(
        f"  {'us':>9} {'spread':>6} {'of ceiling':>10} {'host us':>8}  case; others / ours"
    )
    failed = [row for row in rows if "error" in row]
    good = [row for row in rows if "seconds" in row]
    failures = [f"  FAILS {r.get('name', r['id'])}: {r['error']}" for r in failed]
    if len(failures) > room // 3:
        more = len(failures) - room // 3
        failures = [*failures[: room // 3], f"  and {more} more failures in the JSON"]
    lines += failures
    shown = max(room - len(lines) - 1, 0)
    lines += [_case(row) for row in sorted(good[:shown], key=lambda row: row["name"])]
    if len(good) > shown:
        lines.append(f"  and {len(good) - shown} more cases in the JSON")
    return lines


def _case(row: Mapping) -> str:
    low, middle, high = (1e6 * x for x in row["seconds"])
    spread = f"{(high - low) / middle:.0%}"  # between the quartiles
    fraction = f"{row['fraction']:.0%} {row['bound'][:4]}" if "fraction" in row else "-"
    backend = "" if row["backend"] != "reference" else "REFERENCE "
    others = " ".join(
        f"{name} {other['ratio']:.2f}" if "ratio" in other else f"{name} fails"
        for name, other in row["others"].items()
    )
    name = row["name"].replace("bfloat16", "bf16").replace("float", "f")
    numbers = f"{middle:>9.1f} {spread:>6} {fraction:>10} {1e6 * row['host_s']:>8.0f}"
    return f"  {numbers}  {backend}{name}; {others}"


def _rate(value: object) -> str:
    return f"{value:.0f}" if isinstance(value, float) else str(value)[:20]


def summarise(runs: Sequence[Mapping]) -> dict[tuple[str, str, str], dict]:
    """By task, mode and way: medians over the rounds, and ratios of runs of the same round.

    "time_ratio", "memory_ratio": to the ordinary step that is run in the same way. "recorded_ratio": of
    a compiled step to the ordinary one that is compiled from a recording.
    """
    found: dict[tuple[str, str, str], dict] = {}
    for task, mode, way in dict.fromkeys((run["task"], run["mode"], run["way"]) for run in runs):
        of_task = [run for run in runs if run["task"] == task]
        mine = [run for run in of_task if (run["mode"], run["way"]) == (mode, way)]
        row: dict = {}
        if errors := [run["error"] for run in mine if "error" in run]:
            row["error"] = errors[0]
        if good := [run for run in mine if "step_s" in run]:
            row |= _medians(good)
            ordinary = [run for run in of_task if run["mode"] == ORDINARY and "step_s" in run]
            same = [run for run in ordinary if run["way"] == way]
            ratios = {
                "time_ratio": paired(good, same, _seconds),
                "memory_ratio": paired(good, same, lambda run: max(run["peak_mib"], 1e-3)),
            }
            if way == "compiled":
                recorded = [run for run in ordinary if run["way"] == "recorded"]
                ratios["recorded_ratio"] = paired(good, recorded, _seconds)
            row |= {name: statistics.median(ratio) for name, ratio in ratios.items() if ratio}
        found[task, mode, way] = row
    return found


def _seconds(run: Mapping) -> float:
    return run["step_s"][1]  # type: ignore[no-any-return]


def paired(
    runs: Sequence[Mapping], base: Sequence[Mapping], value: Callable[[Mapping], float]
) -> list[float]:
    """value(run) / value(base run of the same round), for rounds in both."""
    below = {run["round"]: value(run) for run in base}
    return [value(run) / below[run["round"]] for run in runs if run["round"] in below]


def _medians(runs: Sequence[Mapping]) -> dict:
    first = runs[0]
    kept = ("kernels", "warnings", "first_step_s")
    row = {name: first[name] for name in kept if name in first}
    row["step_s"] = [statistics.median(run["step_s"][i] for run in runs) for i in range(3)]
    row["peak_mib"] = statistics.median(run["peak_mib"] for run in runs)
    row["launches"] = first.get("profile", {}).get("launches")
    row["top"] = first.get("profile", {}).get("kernels", [])[:3]
    return row


def _steps(steps: Mapping) -> list[str]:
    rows = summarise(steps["runs"])
    ways = "".join(f"{way:>21}" for way in WAY_SECONDS)
    lines = [
        f"steps: {len(steps['runs'])} runs, {steps['not_run']} not run; of each way ms, spread, x: to "
        "non_private run in the same way, [goal]; rec x: compiled to recorded",
        f"  {'':<29}{ways} {'rec x':>6} {'GiB':>6} {'memory x':>12} {'launches':>11} {'first s':>7}",
    ]
    for task, mode in dict.fromkeys(names[:2] for names in rows):
        mine = {way: rows.get((task, mode, way), {}) for way in WAY_SECONDS}
        if any("step_s" in row for row in mine.values()):
            lines.append(_step(task, mode, mine))
        top = mine["compiled"].get("top")
        if mode == PRIVATE and top:
            kernels = ", ".join(f"{k['name'][:NAME].strip()} {k['share']:.0%}" for k in top)
            lines.append(f"    top: {kernels}")
    told = [(names, row["error"]) for names, row in rows.items() if "error" in row]
    lines += [f"  FAILS {' '.join(names)}: {error}" for names, error in told][:TROUBLES]
    return lines + _fallbacks(rows)


def _step(task: str, mode: str, ways: Mapping[str, Mapping]) -> str:
    """A model in one mode: memory is of the compiled step, where there is one; of launches are told
    those of a step as it is and those of the compiled one."""
    goal = GOALS.get(task, {}) if mode == PRIVATE else {}
    text = f"  {task:<16} {mode:<12}"
    for way, row in ways.items():
        if "step_s" not in row:
            text += f"{'-':>21}"
            continue
        low, middle, high = (1e3 * x for x in row["step_s"])
        ratio = _ratio(row, "time_ratio", goal.get("time") if way == "compiled" else None)
        text += f"{f'{middle:.1f} {(high - low) / middle:.0%} {ratio}':>21}"
    last = next((ways[way] for way in ("compiled", "eager") if "step_s" in ways[way]), {})
    counts = [ways[way].get("launches") for way in ("eager", "compiled")]
    launches = ">".join("-" if count is None else f"{count:.0f}" for count in counts)
    peak = f"{last['peak_mib'] / 1024:.1f}" if last else "-"
    first = f"{last['first_step_s']:.0f}" if last else "-"
    memory = _ratio(last, "memory_ratio", goal.get("memory"))
    recorded = _ratio(ways["compiled"], "recorded_ratio")
    return f"{text} {recorded:>6} {peak:>6} {memory:>12} {launches:>11} {first:>7}"


def _fallbacks(rows: Mapping[tuple[str, str, str], Mapping]) -> list[str]:
    """Operations without a kernel in fastclip's steps, and the warnings."""
    mine = [row for names, row in rows.items() if names[1] == PRIVATE]
    served = {name: by for row in mine for name, by in (row.get("kernels") or {}).items()}
    slow = [name for name, by in served.items() if by.startswith("reference")]
    lines = [f"  by the reference: {', '.join(slow)}"] if slow else []
    warned = dict.fromkeys(text for row in mine for text in row.get("warnings") or ())
    return lines + [f"  WARNING: {text}" for text in warned][:WARNINGS]


def _ratio(row: Mapping, name: str, goal: float | None = None) -> str:
    found = f"{row[name]:.2f}" if name in row else "-"
    return f"{found} [{goal:.2f}]" if goal else found

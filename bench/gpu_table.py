"""The table that `python -m bench.gpu` prints last: at most 76 lines of at most 150 columns.

That is less than 12,000 characters, of which many a machine shows no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.gpu_runs import GOALS

WIDTH, LINES, FAILURES, WARNINGS = 150, 76, 5, 3
NAME = 34  # columns of a kernel's name


def table(result: Mapping) -> str:
    """What was measured, as text."""
    lines = [f"{result.get('card', 'no card')}, {result['date']}"]
    lines += [f"PROBLEM: {problem}" for problem in result["problems"]]
    if not result["problems"]:
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        lines.append(f"{versions}; driver {result.get('driver', '-')}, nvcc {result['nvcc']}")
    lines += _ahead(result)
    if "tests" in result:
        lines += _tests(result["tests"])
    steps = _steps(result["steps"]) if "steps" in result else []
    if "kernels" in result:
        room = LINES - len(lines) - len(steps) - 3  # the last line, and bench.gpu's own
        lines += _kernels(result["kernels"], max(room, 8))
    lines += steps
    ended = f"; {result['ended']}" if "ended" in result else ""
    lines.append(f"{result.get('seconds', 0):.0f} s in all{ended}")
    return "\n".join(line[:WIDTH] for line in lines[: LINES - 1])


def _ahead(result: Mapping) -> list[str]:
    """What became of fastclip._C and of what was compiled beforehand."""
    lines = []
    if build := result.get("build"):
        seconds = f"{build['seconds']:.0f} s"
        told = f"built in {seconds}" if build["built"] else f"ABSENT: {build['why']} ({seconds})"
        lines.append(f"fastclip._C: {told}")
    if ahead := result.get("ahead"):
        failed = [f"{row['task']} {row['error']}" for row in ahead if "error" in row]
        longest = max((row.get("seconds", 0.0) for row in ahead), default=0.0)
        text = f"compiled ahead: {len(ahead) - len(failed)} of {len(ahead)} in {longest:.0f} s"
        lines.append(f"{text}; {'; '.join(failed)}" if failed else text)
    return lines


def _tests(tests: Mapping) -> list[str]:
    counts = ", ".join(
        f"{tests[name]} {name}" for name in ("passed", "failed", "errors", "skipped")
    )
    lines = [f"tests: {counts} in {tests['seconds']:.0f} s {tests.get('error', '')}".rstrip()]
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


def _steps(steps: Mapping) -> list[str]:
    rows: Sequence[Mapping] = steps["summary"]
    lines = [
        f"steps: {len(steps['runs'])} runs, {steps['not_run']} not run; x: to non_private of the "
        "same kind, [goal]; eager x: of a graph to non_private without"
    ]
    lines.append(
        f"  {'':<35}{'ms':>8} {'quartiles':>17} {'time x':>13} {'eager x':>7} {'GiB':>6} "
        f"{'memory x':>13} {'host ms':>7} {'syncs':>5} {'launches':>8} {'busy':>5}"
    )
    order = list(dict.fromkeys(row["task"] for row in rows))
    for task in order:
        mine = [row for row in rows if row["task"] == task]
        for row in mine:
            lines += _step(row)
        for row in mine:
            if row["mode"] == "fastclip":
                lines += _closely(row)
    return lines + _fallbacks(rows)


def _step(row: Mapping) -> list[str]:
    name = f"  {row['task']:<17}{row['mode']:<18}"
    if "step_s" not in row:
        return [f"{name}  {row['error']}"]
    low, middle, high = (1e3 * x for x in row["step_s"])
    goal = GOALS.get(row["task"], {}) if row["mode"].startswith("fastclip") else {}
    syncs = row.get("host_syncs")
    launches = f"{row['launches']:.0f}" if "launches" in row else "-"
    busy = f"{row['busy_share']:.0%}" if "busy_share" in row else "-"
    line = (
        f"{name}{middle:>8.1f} {f'[{low:.1f}, {high:.1f}]':>17} "
        f"{_ratio(row, 'time_ratio', goal.get('time')):>13} {_ratio(row, 'eager_ratio'):>7} "
        f"{row['peak_mib'] / 1024:>6.1f} {_ratio(row, 'memory_ratio', goal.get('memory')):>13} "
        f"{1e3 * row['host_s']:>7.1f} {'-' if syncs is None else syncs:>5} {launches:>8} {busy:>5}"
    )
    lines = [line, f"{name}  {row['error']}"] if "error" in row else [line]
    if parts := row.get("host_parts_s"):
        told = ", ".join(f"{part} {1e3 * s:.1f}" for part, s in parts.items())
        lines.append(f"    host ms: {told}")
    return lines


def _closely(row: Mapping) -> list[str]:
    """The kernels that take the most of fastclip's step, and how norms were computed."""
    lines = []
    if top := row.get("top"):
        kernels = ", ".join(f"{k['name'][:NAME].strip()} {k['share']:.0%}" for k in top[:3])
        lines.append(f"    top: {kernels}")
    if norms := row.get("norms"):
        counts = ", ".join(f"{name} {count}" for name, count in norms.items())
        held = row["held_bytes"] / 2**30
        searched = f"; {row['searches']} searches of Triton" if "searches" in row else ""
        lines.append(f"    norms: {counts}; {held:.2f} GiB held{searched}")
    return lines


def _fallbacks(rows: Sequence[Mapping]) -> list[str]:
    """What no kernel served in fastclip's steps, and what was warned of."""
    mine = [row for row in rows if row["mode"] == "fastclip"]
    served = {name: by for row in mine for name, by in (row.get("kernels") or {}).items()}
    slow = [name for name, by in served.items() if by.startswith("reference")]
    lines = [f"  by the reference: {', '.join(slow)}"] if slow else []
    warned = dict.fromkeys(text for row in mine for text in row.get("warnings") or ())
    return lines + [f"  WARNING: {text}" for text in warned][:WARNINGS]


def _ratio(row: Mapping, name: str, goal: float | None = None) -> str:
    found = f"{row[name]:.2f}" if name in row else "-"
    return f"{found} [{goal:.2f}]" if goal else found

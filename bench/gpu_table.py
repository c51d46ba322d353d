"""The short table that `python -m bench.gpu` prints last: at most 60 lines of at most 150 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WIDTH, LINES, FAILURES, WARNINGS = 150, 60, 5, 3


def table(result: Mapping) -> str:
    """What was measured, as text."""
    lines = [f"{result.get('card', 'no card')}, {result['date']}"]
    lines += [f"PROBLEM: {problem}" for problem in result["problems"]]
    if not result["problems"]:
        versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
        lines.append(f"{versions}; driver {result.get('driver', '-')}, nvcc {result['nvcc']}")
    if "tests" in result:
        lines += _tests(result["tests"])
    steps = _steps(result["steps"]) if "steps" in result else []
    if "kernels" in result:
        room = LINES - len(lines) - len(steps) - 3  # the last line, and bench.gpu's own
        lines += _kernels(result["kernels"], max(room, 8))
    lines += steps
    lines.append(f"{result.get('seconds', 0):.0f} s in all")
    return "\n".join(line[:WIDTH] for line in lines[: LINES - 1])


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
    lines = [f"steps: {len(steps['runs'])} runs, {steps['not_run']} not run"]
    lines.append(
        f"  {'':<31}{'ms':>9} {'quartiles':>19} {'time x':>7} {'GiB':>7} {'memory x':>8} "
        f"{'host ms':>8} {'syncs':>6}"
    )
    order = list(dict.fromkeys(row["task"] for row in rows))
    for row in sorted(rows, key=lambda row: order.index(row["task"])):
        name = f"  {row['task']:<17}{row['mode']:<14}"
        if "step_s" not in row:
            lines.append(f"{name}  {row['error']}")
            continue
        low, middle, high = (1e3 * x for x in row["step_s"])
        quartiles = f"[{low:.1f}, {high:.1f}]"
        syncs = "-" if row["host_syncs"] is None else row["host_syncs"]
        lines.append(
            f"{name}{middle:>9.1f} {quartiles:>19} {_ratio(row, 'time_ratio'):>7} "
            f"{row['peak_mib'] / 1024:>7.2f} {_ratio(row, 'memory_ratio'):>8} "
            f"{1e3 * row['host_s']:>8.1f} {syncs:>6}"
        )
    return lines + _fallbacks(rows)


def _fallbacks(rows: Sequence[Mapping]) -> list[str]:
    """What no kernel served in fastclip's steps, and what was warned of."""
    mine = [row for row in rows if row["mode"] == "fastclip"]
    served = {name: by for row in mine for name, by in (row.get("kernels") or {}).items()}
    slow = [name for name, by in served.items() if by.startswith("reference")]
    lines = [f"  by the reference: {', '.join(slow)}"] if slow else []
    warned = dict.fromkeys(text for row in mine for text in row.get("warnings") or ())
    return lines + [f"  WARNING: {text}" for text in warned][:WARNINGS]


def _ratio(row: Mapping, name: str) -> str:
    return f"{row[name]:.2f}" if name in row else "-"

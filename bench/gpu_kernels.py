"""The microbenchmarks of bench.gpu_card, in processes that are replaced if a case ends them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from bench.children import Child
from bench.deadline import Deadline

SILENCE = 75.0  # seconds without a message after which a process is taken to hang
STARTS = 25  # of the process that times kernels


def compile_ahead(order: Mapping, count: int, module: str = "bench.kernels.harness") -> list[Child]:
    """Processes that together run every microbenchmark once, untimed, to fill Triton's cache."""
    children = []
    for k in range(count):
        child = Child(["-m", module])
        child.send({**order, "share": [k, count], "seconds": 0})
        children.append(child)
    return children


def run_kernels(
    deadline: Deadline, order: Mapping, result: dict, save: Callable[[], None],
    module: str = "bench.kernels.harness", silence: float = SILENCE,
) -> dict:  # fmt: skip
    """Time the microbenchmarks, the most important first, until the deadline.

    A case that ends its process, hangs, or loses the GPU's context becomes a row with its error, and
    a new process continues after it. Rows that exist are not run again.

    Returns:
        "ceiling", "rows", "planned" (how many cases there are), "not_run"; "error" where the
        process could not work at all. It is in result["kernels"], and saved, as rows come.
    """
    found: dict = result.setdefault("kernels", {"ceiling": None, "rows": [], "planned": None})
    found.pop("error", None)
    done: list[str] = [row["id"] for row in found["rows"]]
    for _ in range(STARTS):
        left = deadline.left()
        if left <= 0:
            break
        with Child(["-m", module]) as child:
            child.send({**order, "skip": done, "seconds": left, "ceiling": found["ceiling"]})
            before = len(done)
            died = _follow(child, found, done, deadline, silence, save)
        if died is None:
            break
        if len(done) == before:  # it would die again
            found["error"] = f"{died['error']} {died['detail']}"
            break
    if found["planned"] is not None:
        found["not_run"] = max(found["planned"] - sum("name" in row for row in found["rows"]), 0)
    save()
    return found


def _follow(
    child: Child, found: dict, done: list[str], deadline: Deadline, silence: float, save: Callable
) -> dict | None:
    """Reads a child's messages until it ends; returns how it died, or None if nothing is left."""
    current: dict | None = None

    def note(row: dict) -> None:
        found["rows"].append(row)
        done.append(row["id"])
        save()

    while True:
        left = deadline.left()
        try:
            message = child.message(min(silence, left))
        except TimeoutError as error:
            if left <= silence:
                return None  # out of time
            if current is not None:
                note({**current, "error": f"TimeoutError: {error}"})
            return {"error": f"TimeoutError: {error}", "detail": ""}
        if message is None:
            died = child.death()
            if current is not None:
                note({**current, "error": f"{died['error']} {died['detail']}".strip()})
            elif died["error"] == "ProcessDied: exit 0":
                return None
            return died
        if "plan" in message:
            found["planned"] = len(message["plan"])
        elif "ceiling" in message:
            found["ceiling"] = message["ceiling"]
        elif "start" in message:
            current = {key: value for key, value in message.items() if key != "start"}
        elif "row" in message:
            current = None
            note(message["row"])

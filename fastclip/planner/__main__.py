"""`python -m fastclip.planner`: the planner's rates on this machine, and `--measure` to find them."""

from __future__ import annotations

import argparse
from dataclasses import asdict

import torch

from fastclip.planner.costs import cache_file, costs_of, device_name, measure, save


def devices() -> list[torch.device]:
    """The CPU and every NVIDIA GPU of this machine."""
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [torch.device("cpu"), *gpus]


def main(arguments: list[str] | None = None) -> int:
    """Print the rates in use, after measuring them where asked to."""
    parser = argparse.ArgumentParser(prog="python -m fastclip.planner", description=__doc__)
    parser.add_argument(
        "--measure",
        action="store_true",
        help="time the operations on each device and keep the rates",
    )
    options = parser.parse_args(arguments)
    for device in devices():
        name = device_name(device)
        if options.measure:
            print(f"measuring {name} ...", flush=True)
            save(device, measure(device))
        known = "measured" if cache_file(name).exists() else "built in; --measure finds its own"
        print(f"{name} ({known})")
        for rate, value in asdict(costs_of(device.type, device.index)).items():
            print(f"  {rate:<12}{value if isinstance(value, bool) else f'{value:.3g}'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""bench.noise: its ways do what they say, and its file holds them. No figure is checked."""

from __future__ import annotations

import json

import torch

from bench import noise


def test_the_file(tmp_path, monkeypatch, capsys) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(noise, "VALUES", 1000)
    monkeypatch.setattr(noise, "PARTS", {"normals": noise.normals})
    try:
        noise.main(["--rounds", "2", "--out", str(tmp_path / "noise.json")])
    finally:
        torch.set_num_threads(threads)
    found = json.loads((tmp_path / "noise.json").read_text())
    assert found["threads"] == 1
    ways = [row["way"] for row in found["summary"]]
    assert ways == ["torch.randn", "normal_ in place", "secure, no guard", "secure"]
    assert found["summary"][0]["ratio"] == 1.0
    assert all(len(row["seconds"]) == 3 for row in found["summary"])
    assert "torch.randn" in capsys.readouterr().out


def test_both_ways_of_clipping_agree(monkeypatch) -> None:
    """What is timed side by side is the same work."""
    monkeypatch.setattr(noise, "BATCH", 2)
    monkeypatch.setattr(noise, "resnet18", lambda: torch.nn.Linear(30, 20))
    ways = noise.clip()
    ways["Opacus"]()
    ways["Opacus"]()  # may be called again
    sums, norms = ways["fastclip"]()
    assert norms.shape == (2,)
    assert [tuple(s.shape) for s in sums] == [(20, 30), (20,)]

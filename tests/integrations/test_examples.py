"""The examples train, and say what they spent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integrations.tiny import furthest, hf, weights

hf_trainer = pytest.importorskip("examples.hf_trainer")
clinicalbert = pytest.importorskip("examples.clinicalbert")


@pytest.mark.extras
def test_hf_trainer_starts(tmp_path: Path) -> None:
    """Two releases of 512 rows in physical batches, within the budget of the whole run."""
    run = hf_trainer.train(str(tmp_path), epochs=0.3, physical=128)
    assert sum(steps for _, _, steps in run.engine.accountant.history) == run.state.global_step > 0
    assert 0 < run.epsilon() <= 8


@pytest.mark.slow
def test_hf_trainer(tmp_path: Path) -> None:
    """It learns more than the commonest class, within its budget."""
    run = hf_trainer.train(str(tmp_path), epochs=2, physical=256)
    best = [entry["eval_accuracy"] for entry in run.state.log_history if "eval_accuracy" in entry]
    assert run.epsilon() <= 8
    assert best[-1] > 0.4


@pytest.mark.extras
def test_clinicalbert(tmp_path: Path) -> None:
    """Patients are units, in physical batches of 100 notes; the encoder comes out as it went in."""
    model, notes = clinicalbert.made_up_model(), clinicalbert.made_up_notes(600)
    training, held_out = clinicalbert.split(notes)
    patients = {note["patient"] for note in training}
    assert not patients & {note["patient"] for note in held_out}
    before = weights(model)
    run = clinicalbert.train(
        model, notes, str(tmp_path), physical=100, epochs=2, epsilon=3.0, patients=500
    )
    found = run.engine.mechanism()
    assert (found.unit, run.engine.sampling.units, found.sample_rate) == (
        "unit",
        len(patients),
        0.5,
    )
    assert run.dp_optimizer.expected_batch_size == 250
    assert sum(steps for *_, steps in found.taken) == run.state.global_step == 4
    assert "added or removed" in found.neighbors
    assert run.epsilon() <= 3
    changed = {name for name, p in weights(model).items() if not torch.equal(p, before[name])}
    assert changed == {"classifier.weight", "classifier.bias"}
    assert set(clinicalbert.accuracy_by_group(run, notes)) == {0, 1}


def test_clinicalbert_reads_a_folder(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cough", "fever", "well"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    tokenizer = hf.BertTokenizer(str(tmp_path / "vocab.txt"))
    tokenizer.save_pretrained(tmp_path)
    model = clinicalbert.made_up_model()
    model.save_pretrained(tmp_path)
    (tmp_path / "notes.csv").write_text(
        'text,label,group,patient\n"cough, fever",1,0,a\nwell,0,1,b\n'
    )
    loaded, notes = clinicalbert.load(tmp_path)
    assert furthest(weights(loaded), weights(model)) == 0
    assert [(note["label"], note["group"]) for note in notes] == [(1, 0), (0, 1)]
    assert all(len(note["input_ids"]) > 2 for note in notes)

"""The examples train, and say what they spent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integrations.tiny import furthest, hf, weights

hf_trainer = pytest.importorskip("examples.hf_trainer")
clinicalbert = pytest.importorskip("examples.clinicalbert")


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


def test_clinicalbert(tmp_path: Path) -> None:
    """A batch of 500 in physical ones of 100; the encoder comes out as it went in."""
    model, notes = clinicalbert.made_up_model(), clinicalbert.made_up_notes(1500)
    before = weights(model)
    run = clinicalbert.train(model, notes, str(tmp_path), physical=100, epochs=2, epsilon=3.0)
    assert run.dp_optimizer.expected_batch_size == 400  # 1,200 rows in three steps
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
    (tmp_path / "notes.csv").write_text('text,label,group\n"cough, fever",1,0\nwell,0,1\n')
    loaded, notes = clinicalbert.load(tmp_path)
    assert furthest(weights(loaded), weights(model)) == 0
    assert [(note["label"], note["group"]) for note in notes] == [(1, 0), (0, 1)]
    assert all(len(note["input_ids"]) > 2 for note in notes)

"""After tutorials/building_text_classifier.ipynb of Opacus: BERT of which the last layer is
trained, BatchMemoryManager.
"""

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from bench.clients.about import About
from bench.clients.generated import sequences

ABOUT = About(
    title="Opacus, tutorials/building_text_classifier",
    version="4d0ebc84",
    kind="text",
    runs="transformers' BERT of 4 layers of 256, last layer, pooler and head trained, 256 pairs "
    "of 128 tokens, "
    "batch 32 in parts of 8, 3 epochs, epsilon 7.5",
    note="a small BERT from its configuration, with numbers as tokens. The original's weights "
    "and data come from a hub",
)
WORDS, LENGTH = 4000, 128


def bert() -> BertForSequenceClassification:
    config = BertConfig(
        num_labels=3,
        vocab_size=WORDS,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        max_position_embeddings=LENGTH,
    )
    return BertForSequenceClassification(config)


def pairs(rows: int, seed: int = 0) -> TensorDataset:
    """Tokens, mask, segments and label, each [rows, 128] or [rows], padded to 128."""
    tokens = torch.zeros(rows, LENGTH, dtype=torch.long)
    mask, segments = torch.zeros_like(tokens), torch.zeros_like(tokens)
    labels = torch.zeros(rows, dtype=torch.long)
    for i, (words, label) in enumerate(sequences(rows, WORDS, 12, 60, classes=3, seed=seed)):
        tokens[i, : len(words)], mask[i, : len(words)], labels[i] = words, 1, label
        segments[i, len(words) // 2 : len(words)] = 1
    return TensorDataset(tokens, mask, segments, labels)


def inputs(batch):
    names = "input_ids", "attention_mask", "token_type_ids", "labels"
    return dict(zip(names, batch, strict=True))


def main(tiny: bool) -> dict:
    rows, batch, part, epochs = (16, 4, 2, 1) if tiny else (256, 32, 8, 3)
    train_loader = DataLoader(pairs(rows), batch_size=batch)
    test_loader = DataLoader(pairs(32, seed=1), batch_size=16)
    model = bert()
    for parameter in model.parameters():
        parameter.requires_grad = False
    for layer in (model.bert.encoder.layer[-1], model.bert.pooler, model.classifier):
        for parameter in layer.parameters():
            parameter.requires_grad = True
    model = model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, eps=1e-8)
    delta = 1 / rows
    engine = PrivacyEngine()
    model, optimizer, train_loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        target_delta=delta,
        target_epsilon=7.5,
        epochs=epochs,
        max_grad_norm=0.1,
    )
    for _ in range(epochs):
        losses = []
        with BatchMemoryManager(
            data_loader=train_loader, max_physical_batch_size=part, optimizer=optimizer
        ) as parts:
            for rows_of_part in parts:
                optimizer.zero_grad()
                outputs = model(**inputs(rows_of_part))
                loss = outputs[0]
                loss.backward()
                losses.append(loss.item())
                optimizer.step()
    model.eval()
    with torch.no_grad():
        for rows_of_part in test_loader:
            model(**inputs(rows_of_part))
    return {"epsilon": engine.get_epsilon(delta), "loss": sum(losses) / len(losses)}

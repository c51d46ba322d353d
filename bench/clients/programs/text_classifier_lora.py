"""The last part of the same tutorial: LoRA of PEFT in the last layer, ghost clipping with
Opacus' criterion.
"""

import torch
from opacus import PrivacyEngine
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from torch.utils.data import DataLoader

from bench.clients.about import About
from bench.clients.programs.text_classifier import bert, inputs, pairs

ABOUT = About(
    title="Opacus, tutorials/building_text_classifier, LoRA",
    version="4d0ebc84",
    kind="text",
    runs="the same BERT with LoRA of rank 32 and dropout in its last layer, "
    '`grad_sample_mode="ghost"`, 256 pairs, '
    "batch 32, 3 epochs",
)


def main(tiny: bool) -> dict:
    rows, batch, epochs = (16, 4, 1) if tiny else (256, 32, 3)
    train_loader = DataLoader(pairs(rows), batch_size=batch)
    config = LoraConfig(
        task_type=TaskType.SEQ_CLS, inference_mode=False, r=32, lora_alpha=32, lora_dropout=0.05
    )
    model = get_peft_model(bert(), config)
    for parameter in model.base_model.bert.encoder.layer[:-1].parameters():
        parameter.requires_grad = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, eps=1e-8)
    model = model.train()
    delta = 1 / rows
    engine = PrivacyEngine()
    model, optimizer, criterion, train_loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        criterion=nn.CrossEntropyLoss(reduction="mean"),
        target_delta=delta,
        target_epsilon=7.5,
        epochs=epochs,
        max_grad_norm=0.1,
        grad_sample_mode="ghost",
    )
    for _ in range(epochs):
        losses = []
        for batch_of_rows in train_loader:
            optimizer.zero_grad()
            outputs = model(**inputs(batch_of_rows))
            loss = criterion(outputs[1], batch_of_rows[3])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return {"epsilon": engine.get_epsilon(delta), "loss": sum(losses) / len(losses)}

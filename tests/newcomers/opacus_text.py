"""Opacus' tutorial on text: BERT of which the last layer, the pooler and the head are trained."""

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification

from fastclip import FastPrivacyEngine as PrivacyEngine

torch.manual_seed(0)
config = BertConfig(
    vocab_size=300, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
    intermediate_size=64, max_position_embeddings=32, num_labels=3,
)  # fmt: skip
model = BertForSequenceClassification(config)
trainable_layers = [model.bert.encoder.layer[-1], model.bert.pooler, model.classifier]
for parameter in model.parameters():
    parameter.requires_grad = False
for layer in trainable_layers:
    for parameter in layer.parameters():
        parameter.requires_grad = True
frozen = model.bert.embeddings.word_embeddings.weight.clone()

ids = torch.randint(300, (192, 24))
data = TensorDataset(ids, torch.ones_like(ids), torch.randint(3, (192,)))
model = model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, eps=1e-8)
privacy_engine = PrivacyEngine()
model, optimizer, train_dataloader = privacy_engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(data, batch_size=32),
    target_delta=1e-3,
    target_epsilon=7.5,
    epochs=2,
    max_grad_norm=0.1,
)
for _ in range(2):
    for input_ids, attention_mask, labels in train_dataloader:
        optimizer.zero_grad()
        outputs = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels)
        loss = outputs[0]
        loss.backward()
        optimizer.step()
assert torch.equal(model.bert.embeddings.word_embeddings.weight, frozen)
epsilon = privacy_engine.get_epsilon(1e-3)
assert 7 < epsilon <= 7.5
print(f"done: epsilon {epsilon:.2f} at noise multiplier {optimizer.noise_multiplier:.2f}")

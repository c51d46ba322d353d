"""A table with a protected column: thresholds by group, accuracy by group, a page to show."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fastclip import FastPrivacyEngine
from fastclip.fairness import FairnessRecorder, fairness_report

torch.manual_seed(0)
sex = (torch.rand(600) < 0.3).long()
x = torch.randn(600, 6)
y = (x[:, 0] + sex > 0.5).long()
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
engine = FastPrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
    data_loader=DataLoader(TensorDataset(x[:500], y[:500], sex[:500]), batch_size=100),
    target_epsilon=8.0,
    target_delta=1e-3,
    epochs=4,
    max_grad_norm=0.5,
    clipping="dpsgd_f",
    num_groups=2,
)
recorder = FairnessRecorder({"sex": ("men", "women")}, ("no", "yes"), protected="sex")
sample_losses = nn.CrossEntropyLoss(reduction="none")
for epoch in range(4):
    for inputs, targets, groups in loader:
        optimizer.zero_grad()
        engine.set_groups(groups)
        sample_losses(model(inputs), targets).mean().backward()
        recorder.observe(optimizer, {"sex": groups})
        optimizer.step()
    recorder.close_period(epoch)
    recorder.thresholds(epoch, optimizer)
logits = model(x[500:]).detach()
recorder.evaluate(
    3, losses=sample_losses(logits, y[500:]), predictions=logits.argmax(1), labels=y[500:],
    groups={"sex": sex[500:]}, epsilon=engine.get_epsilon(1e-3),
)  # fmt: skip
fairness_report(recorder, "report.html", title="By sex")
frame = recorder.frame()
accuracy = frame[(frame["measure"] == "accuracy") & (frame["attribute"] == "sex")]
print(f"done: {dict(zip(accuracy['group'], accuracy['value'].round(2), strict=True))}")

"""After examples/opacus of Flower: a ClientApp that makes its model private in each round,
FedAvg above it.
"""

import copy

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity
from opacus import PrivacyEngine
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from bench.clients.about import About
from bench.clients.generated import images

ABOUT = About(
    title="Flower, examples/opacus",
    version="flwr",
    kind="vision",
    runs="its network of 62 k parameters, 2 clients of 1,024 images of 3 x 32 x 32, batch 32, "
    "3 rounds, one engine per round",
    note="messages, ClientApp and FedAvg are Flower's. The clients run in the server's "
    "process, not in Ray's. Images are generated",
)
CLIENTS = 2
app = ClientApp()
size = {"rows": 1024}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc1(x.view(-1, 16 * 5 * 5)))
        return self.fc3(F.relu(self.fc2(x)))


def loader(partition: int) -> DataLoader:
    return DataLoader(images(size["rows"], 3, 32, seed=partition), batch_size=32, shuffle=True)


@app.train()
def train(message: Message, context: Context) -> Message:
    partition = context.node_config["partition-id"]
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    engine = PrivacyEngine(secure_mode=False)
    model, optimizer, private_loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader(partition),
        noise_multiplier=1.0 if partition % 2 == 0 else 1.5,
        max_grad_norm=1.0,
    )
    model.train()
    criterion = nn.CrossEntropyLoss()
    for x, y in private_loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    metrics = {
        "num-examples": len(private_loader.dataset),
        "epsilon": engine.get_epsilon(delta=1e-5),
        "loss": loss.item(),
    }
    content = {
        "arrays": ArrayRecord(model._module.state_dict()),
        "metrics": MetricRecord(metrics),
    }
    return Message(content=RecordDict(content), reply_to=message)


class InProcess(Grid):
    """Each message goes to the client app at once."""

    def __init__(self) -> None:
        self.contexts = [
            Context(0, n, {"partition-id": n, "num-partitions": CLIENTS}, RecordDict(), {})
            for n in range(CLIENTS)
        ]
        self.metrics: list[dict] = []

    def set_run(self, run_id: int) -> None: ...
    def run(self): ...
    def create_message(self, *args, **kwargs): ...
    def push_messages(self, messages): ...
    def pull_messages(self, message_ids): ...

    def get_node_ids(self):
        return range(1, CLIENTS + 1)

    def send_and_receive(self, messages, *, timeout=None):
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = f"m{node}"
            reply = app(copy.deepcopy(message), self.contexts[node - 1])
            self.metrics.append(dict(reply.content["metrics"]))
            replies.append(reply)
        return replies


def main(tiny: bool) -> dict:
    size["rows"] = 128 if tiny else 1024
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    grid = InProcess()
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=CLIENTS)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=1 if tiny else 3,
        train_config=ConfigRecord({}),
    )
    last = grid.metrics[-CLIENTS:]
    epsilon = max(m["epsilon"] for m in last)
    return {"epsilon": epsilon, "loss": last[0]["loss"]}

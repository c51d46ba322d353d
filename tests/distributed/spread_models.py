"""Models of every kind that fully_shard spreads, and what is asked of them in the middle of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertForSequenceClassification

from fastclip import BatchMemoryManager
from fastclip.backward import state
from fastclip.backward.state import ShardedSums
from tests.distributed.training import batches, full, private, spread
from tests.oracle import sample_loss

N, STEPS = 24, 8


class Inputs(Dataset):
    """(row, its number), float64 or tokens."""

    def __init__(self, *shape: int, tokens: int = 0) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(N, *shape, generator=generator).double()
        if tokens:
            self.x = torch.randint(tokens, (N, *shape), generator=generator)

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i], i


def plain() -> nn.Sequential:
    """[b, 6] -> [b, 3]."""
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.last(checkpoint(self.middle, x, use_reentrant=self.reentrant).tanh())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(x))).mean(1)


class Late(nn.Module):
    """A layer that is used from the fourth step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.late, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        return self.last(self.late(x).tanh() if self.steps > 3 else x)


class Experts(nn.Module):
    """Rows go to one of two layers by their values."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(6, 2), nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(1)
        out, chosen = torch.zeros_like(x), weights.argmax(1)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number : number + 1])
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Logits(nn.Module):
    """A small BERT, which gives its logits alone."""

    def __init__(self, *, lora: bool = False) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=12, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        bert: Any = BertForSequenceClassification(config)
        self.layers = bert.bert.encoder.layer
        adapters = LoraConfig(r=2, target_modules=["query", "value"], task_type="SEQ_CLS")
        self.bert = get_peft_model(bert, adapters) if lora else bert

    def forward(self, x: Tensor) -> Tensor:
        return self.bert(x).logits


def frozen() -> nn.Module:
    """Its first layer does not train."""
    net = plain()
    net[0].requires_grad_(False)
    return net


def conv() -> nn.Module:
    """[b, 3, 6, 6] -> [b, 3]."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 3),
        nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip


def normed() -> nn.Module:
    """Weights that are computed from parameters, in the middle."""
    return nn.Sequential(nn.Linear(6, 6), weight_norm(nn.Linear(6, 8)), nn.Linear(8, 3))


def routed() -> nn.Module:
    """Experts that are spread together with the model itself."""
    return nn.Sequential(nn.Linear(6, 6), Experts(), nn.Linear(6, 3))


Parts = Callable[[Any], Iterator[nn.Module]]
MODELS: dict[str, tuple[Callable[[], nn.Module], Parts, Inputs]] = {
    "plain": (plain, lambda net: iter((net[0], net[2])), Inputs(6)),
    "frozen": (frozen, lambda net: iter((net[0], net[2])), Inputs(6)),
    "checkpointed": (
        lambda: Checkpointed(reentrant=False),
        lambda net: iter((net.first, net.middle)),
        Inputs(6),
    ),
    "reentrant": (
        lambda: Checkpointed(reentrant=True), lambda net: iter((net.first, net.middle)), Inputs(6)
    ),
    "tied": (Tied, lambda net: iter(()), Inputs(5, tokens=11)),
    "late": (Late, lambda net: iter((net.late,)), Inputs(6)),
    "conv": (conv, lambda net: iter((net[0], net[3])), Inputs(3, 6, 6)),
    "normed": (normed, lambda net: iter(net), Inputs(6)),
    "routed": (routed, lambda net: iter((net[0], net[2])), Inputs(6)),
    "attention": (Attention, lambda net: iter((net.attention,)), Inputs(4, 8)),
    "recurrent": (Recurrent, lambda net: iter((net.lstm,)), Inputs(4, 6)),
    "bert": (Logits, lambda net: iter(net.layers), Inputs(8, tokens=40)),
    "lora": (lambda: Logits(lora=True), lambda net: iter(net.layers), Inputs(8, tokens=40)),
}  # fmt: skip


def built(name: str) -> nn.Module:
    """The same weights everywhere."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return MODELS[name][0]().double().train()


def sharded(name: str, **options: Any) -> nn.Module:
    """The same by its parts, of which some are spread by themselves."""
    net = built(name)
    for part in MODELS[name][1](net):
        spread(part, **options)
    return spread(net, **options)


def made_of(net: nn.Module, name: str, **options: Any) -> tuple:
    """(engine, model, optimizer, loader); an empty draw is a placeholder row for transformers."""
    return private(net, data=MODELS[name][2], rand_on_empty=name in ("bert", "lora"), **options)


def weights(net: nn.Module) -> Tensor:
    """All of them."""
    return torch.cat([full(p.detach()).reshape(-1).double() for p in net.parameters()])


def step(made: tuple, net: Any, x: Tensor) -> None:
    """One step on these rows."""
    if hasattr(net, "steps"):
        net.steps += 1
    made[2].zero_grad()
    sample_loss(made[1](x)).mean().backward()
    made[2].step()


def train(name: str, net: nn.Module) -> dict[str, Any]:
    """By the loader's draws: the rows of each (without placeholders), and where it led."""
    torch.manual_seed(5)
    made, x = made_of(net, name), MODELS[name][2].x
    drawn, states = [], []
    for rows, numbers in batches(made[3], STEPS):
        step(made, net, rows)
        pairs = zip(rows, numbers.tolist(), strict=True)
        drawn.append([i for row, i in pairs if torch.equal(x[i], row)])
        states.append(weights(net))
    return {"drawn": drawn, "states": states}


def replay(name: str, drawn: list[list[int]]) -> list[Tensor]:
    """One process on these rows; a draw of none, which transformers cannot take, moves nothing."""
    net, states = built(name), []
    made = private(net, data=MODELS[name][2], poisson=False, expected_batch_size=4.0)
    for numbers in drawn:
        if numbers or name not in ("bert", "lora"):
            step(made, net, MODELS[name][2].x[numbers])
        states.append(weights(net))
    return states


def models() -> dict[str, Any]:
    """All of them, and one that is compiled."""
    found = {name: train(name, sharded(name)) for name in MODELS}
    compiled: Any = torch.compile(sharded("plain"), backend="eager")
    return {**found, "plain, compiled": train("plain", compiled)}


# What happens between steps, to `plain`


def between(act: Callable[[tuple, nn.Module], None], **options: Any) -> Tensor:
    """The weights after six steps, before each of which `act` does something else."""
    net = sharded("plain")
    torch.manual_seed(5)
    made = made_of(net, "plain", **options)
    for x, _ in batches(made[3], 6):
        act(made, net)
        step(made, net, x)
    return weights(net)


def evaluated(made: tuple, net: nn.Module) -> None:
    made[1].eval()
    with torch.no_grad():
        made[1](torch.ones(2, 6).double())
    made[1].train()


def paused(made: tuple, net: nn.Module) -> None:
    with made[0].paused():
        made[1](torch.ones(3, 6).double()).sum().backward()


def kept_whole(made: tuple, net: Any) -> None:
    net.set_reshard_after_forward(False)


def released(made: tuple, net: nn.Module) -> None:
    """Nothing whole, and no sum of a whole parameter, is left after a step."""
    grad_state = made[2].grad_state
    assert not any(p.untyped_storage().nbytes() for p in grad_state.names)
    assert not grad_state.sums._held


def in_small_buckets() -> Tensor:
    """Sums travel a few at once; of others small ones alone, which are summed together, are whole."""
    before, state._BUCKET = state._BUCKET, 300
    exchange, held = ShardedSums.exchange, []

    def watched(self: ShardedSums, parameters: list[nn.Parameter]) -> None:
        held.append((len(self._held), len(parameters)))
        exchange(self, parameters)

    ShardedSums.exchange = watched  # type: ignore[method-assign]
    try:
        found = between(released)
    finally:
        state._BUCKET = before
        ShardedSums.exchange = exchange  # type: ignore[method-assign]
    assert len(held) == 6 * 4
    assert all(whole <= sent + 1 < 6 for whole, sent in held), held
    return found


def by_workers() -> list[Tensor]:
    """With a loader of two processes; and by physical batches of one row."""
    found = []
    for rows in (None, 1):
        net = sharded("plain")
        torch.manual_seed(5)
        loader = DataLoader(MODELS["plain"][2], batch_size=4, num_workers=2)
        made, steps = made_of(net, "plain", loader=loader), 0
        options: Any = {"max_physical_batch_size": rows or 100, "optimizer": made[2]}
        with BatchMemoryManager(data_loader=made[3], **options) as parts:
            for x, _ in parts:
                step(made, net, x)
                steps += not made[2]._is_last_step_skipped
                if steps == 6:
                    break
        found.append(weights(net))
    return found


def broken_off() -> dict[str, Any]:
    """Passes over the data that are left while workers have drawn ahead: nothing of them is left."""
    net = sharded("plain")
    torch.manual_seed(6)
    loader = DataLoader(MODELS["plain"][2], batch_size=4, num_workers=2)
    made, rows = made_of(net, "plain", loader=loader), []
    for _ in range(4):
        options: Any = {"max_physical_batch_size": 1, "optimizer": made[2]}
        with BatchMemoryManager(data_loader=made[3], **options) as parts:
            for x, _ in parts:
                step(made, net, x)
                rows.append(len(x))
                if not made[2]._is_last_step_skipped:
                    break
    return {"weights": weights(net), "steps": made[2].grad_state.clipping.step, "rows": rows}


def events() -> dict[str, Tensor]:
    """The same run, whatever happens beside it."""
    return {
        "nothing": between(lambda made, net: None),
        "evaluated": between(evaluated),
        "paused": between(paused),
        "kept whole": between(kept_whole),
        "freed": between(released),
        "small buckets": in_small_buckets(),
        **dict(zip(("workers", "physical batches by workers"), by_workers(), strict=True)),
    }


def mixed() -> dict[str, Any]:
    """Gradients of one step on one row a rank: float32, and bfloat16 in four ways."""
    found = {}
    for name in ("float32", "policy", "policy, output", "cast by hand", "autocast"):
        net = built("plain").float()
        options: dict[str, Any] = {}
        if name not in ("float32", "autocast"):
            output = torch.float32 if "output" in name else None
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, output_dtype=output,
                cast_forward_inputs=name != "cast by hand",
            )  # fmt: skip
        if "output" not in name:
            spread(net[0], **options)
        spread(net, **options)
        made = private(net, poisson=False, lr=0.0, loader=loader_of_shares())
        for x, _ in made[3]:
            x = 100 * x.to(torch.bfloat16 if name == "cast by hand" else torch.float32)
            with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
                y = made[1](x)
            sample_loss(y.float()).mean().backward()
            made[2].step()
            break
        found[name] = torch.cat([full(p.grad).reshape(-1) for p in net.parameters()])
    return found


def loader_of_shares() -> DataLoader:
    """One row a rank and step."""
    data = MODELS["plain"][2]
    sampler: Any = torch.utils.data.DistributedSampler(data, shuffle=False)
    return DataLoader(data, batch_size=1, sampler=sampler)


def cleaned() -> list[bool]:
    """After cleanup(), fully_shard's own gradients come back."""
    net = sharded("plain")
    made = made_of(net, "plain")
    for x, _ in batches(made[3], 2):
        step(made, net, x)
    made[1].cleanup()
    sample_loss(net(torch.ones(2, 6).double())).mean().backward()
    return [bool(full(p.grad).any()) for p in net.parameters()]


def spread_models() -> dict[str, Any]:
    """All of it."""
    return {
        "models": models(), "events": events(), "mixed": mixed(), "cleaned": cleaned(),
        "broken off": broken_off(),
    }  # fmt: skip

"""What is frozen is neither touched nor kept; what cannot be right is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fastclip.engine import validation
from fastclip.errors import ArgumentError
from fastclip.integrations import bias_only, head_only
from tests.integrations.adapters import batch, lora, peft
from tests.integrations.tiny import CLASSES, bert, furthest, trainer, weights
from tests.oracle import (
    Batch,
    assert_sums,
    backward,
    check_exact,
    clipped_sum,
    make_private,
    per_sample_gradients,
    sample_loss,
    summed,
)
from tests.refusal import refused


def classify(output, labels: torch.Tensor) -> torch.Tensor:
    """Each row's own cross entropy, [b]."""
    return nn.functional.cross_entropy(output.logits, labels, reduction="none")


def test_lora_with_a_trainer(tmp_path: Path) -> None:
    """Base weights stay as they were, bit for bit; the checkpoint is an ordinary adapter."""
    model = lora()
    before = weights(model)
    run = trainer(tmp_path, model, 4, 2, arguments={"save_strategy": "epoch"})
    run.train()
    after = weights(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for name in after:
        assert torch.equal(after[name], before[name]) == (name not in trained), name
    loaded = peft.PeftModel.from_pretrained(bert(), tmp_path / "checkpoint-6")
    assert furthest(weights(loaded), after) == 0
    tokens = {"input_ids": torch.tensor([[5, 6, 7]])}
    merged = model.eval()(**tokens).logits
    torch.testing.assert_close(model.merge_and_unload()(**tokens).logits, merged)


@pytest.mark.slow
def test_lora_resumes(tmp_path: Path) -> None:
    saving = {"save_strategy": "epoch"}
    trainer(tmp_path, lora(), arguments=saving).train()
    run = trainer(tmp_path, lora(), arguments=saving)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert sum(steps for _, _, steps in run.engine.accountant.history) == 6


@pytest.mark.slow
def test_merged_adapters_are_refused(tmp_path: Path) -> None:
    """Their matrices would be trained on noise alone."""
    model = lora()
    model.merge_adapter()
    with refused("unmerge_adapter"):
        trainer(tmp_path, model).train()
    with refused("unmerge_adapter"):
        make_private(model)
    model.unmerge_adapter()
    trainer(tmp_path, model).train()


def saved_bytes(model: nn.Module, example: Batch) -> int:
    """What one forward pass leaves for the backward pass, parameters apart."""
    own = {p.data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() not in own:
            kept[x.data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        classify(model(**example.kwargs), example.target).mean().backward()
    return sum(kept.values())


def test_biases_need_no_inputs_of_layers() -> None:
    """No more than ordinary bias-only training keeps, and less than training the weights."""
    ordinary = saved_bytes(bias_only(bert()).train(), batch())
    found = {}
    for name, model in {"biases": bias_only(bert()), "all": bert()}.items():
        _, private, _, _ = make_private(model.train())
        backward(private, batch(), classify)  # the first pass looks at how the model is built
        private.zero_grad()
        found[name] = saved_bytes(private, batch())
    assert found["biases"] <= ordinary
    assert found["biases"] < 0.8 * found["all"]


def test_a_frozen_backbone_costs_nothing() -> None:
    """Nothing below the head is intercepted, or kept for the backward pass."""
    model = head_only(bert().train(), "classifier")
    engine, private, _, _ = make_private(model)
    backward(private, batch(), classify)
    assert [row.path for row in engine.plan().rows] == ["classifier"]
    frozen = [m for name, m in model.named_modules() if name and name != "classifier"]
    assert not any("forward" in m.__dict__ for m in frozen)
    private.zero_grad()
    head_inputs = 4 * 16 * 4  # four rows of the pooled output
    assert saved_bytes(private, batch()) <= head_inputs + 4 * CLASSES * 4 * 4 + 64


def test_helpers_name_what_there_is() -> None:
    with pytest.raises(ArgumentError, match="one of its modules: bert, classifier"):
        head_only(bert(), "head")
    with pytest.raises(ArgumentError, match="no bias"):
        bias_only(nn.Sequential(nn.Linear(2, 2, bias=False)))


def body() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))


@pytest.mark.filterwarnings("ignore:Failed to load the CUDA", "ignore:Setting boft_n_butterfly")
@pytest.mark.parametrize(
    "told", [{"boft_block_size": 4}, {"boft_block_size": 0, "boft_block_num": 2}]
)
def test_rotations_of_butterflies(told: dict) -> None:
    """Whose weights take the type of the samples."""
    made = peft.BOFTConfig(target_modules=["0", "2"], init_weights=False, **told)
    model = peft.get_peft_model(body(), made)
    check_exact(model, torch.randn(4, 8), dtype=torch.float64)


BOTH = {"target_modules": ["0", "2"], "r": 2}
FACTORED = {
    "LoHa": peft.LoHaConfig(init_weights=False, **BOTH),
    "LoKr": peft.LoKrConfig(init_weights=False, **BOTH),
    "DoRA": peft.LoraConfig(use_dora=True, init_lora_weights=False, **BOTH),
}


@pytest.mark.parametrize("shape", [(4, 8), (4, 3, 8)])
@pytest.mark.parametrize("name", FACTORED)
def test_products_of_factors(name: str, shape: tuple[int, ...]) -> None:
    """Whose weights are computed from several small matrices."""
    model = peft.get_peft_model(body(), FACTORED[name])
    check_exact(model, torch.randn(shape), dtype=torch.float64)


def convolution(effective: bool) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    told = {"target_modules": ["0"], "r": 2, "init_weights": False}
    return peft.get_peft_model(net, peft.LoHaConfig(use_effective_conv2d=effective, **told))


@pytest.mark.parametrize("effective", [False, True])
def test_loha_of_convolutions(effective: bool) -> None:
    """Against the derivative of what PEFT computes. PEFT's own backward pass of three factors (0.21)
    takes those of the second product for the first."""
    model, x = convolution(effective), torch.randn(4, 3, 4, 4)
    layer = model.base_model.model[0]
    plain = model(x)
    validation.write_out(layer)
    torch.testing.assert_close(model(x), plain)
    check_exact(model, x, dtype=torch.float64)


def test_loha_is_given_back() -> None:
    model = convolution(True)
    layer, private = model.base_model.model[0], make_private(model)[1]
    assert "get_delta_weight" in vars(layer)
    private.cleanup()
    assert "get_delta_weight" not in vars(layer)


ADAPTERS = {
    "LoRA": peft.LoraConfig(init_lora_weights=False, **BOTH),
    "DoRA": FACTORED["DoRA"],
    "LoHa": FACTORED["LoHa"],
    "BOFT": peft.BOFTConfig(target_modules=["0", "2"], boft_block_size=4, init_weights=False),
    "gains": peft.IA3Config(target_modules=["0"], feedforward_modules=[], init_ia3_weights=False),
}


@pytest.mark.filterwarnings("ignore:Failed to load the CUDA", "ignore:Setting boft_n_butterfly")
@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("name", ADAPTERS)
def test_the_reference_is_computed_first(name: str, graph: bool) -> None:
    """Without adapters nothing private runs, which says nothing of the calls with them."""
    model, x = peft.get_peft_model(body(), ADAPTERS[name]).double(), torch.randn(4, 8).double()
    grads = per_sample_gradients(model, x)
    private = make_private(model, max_grad_norm=0.1)[1]
    for _ in range(2):
        private.zero_grad()
        with model.disable_adapter(), torch.set_grad_enabled(graph):
            reference = private(x).detach()
        out = private(x)
        assert not torch.equal(reference, out)
        sample_loss(out).mean().backward()
        assert_sums(summed(dict(model.named_parameters())), clipped_sum(grads, 0.1), 1e-10)

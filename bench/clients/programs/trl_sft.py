"""TRL's SFTTrainer with LoRA; its model and optimizer are made private by hand, for it has no
privacy of its own.
"""

import torch
from datasets import Dataset
from opacus import GradSampleModule
from opacus.accountants import RDPAccountant
from opacus.optimizers import DPOptimizer
from peft import LoraConfig
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

from bench.clients.about import About
from bench.clients.programs.nemo import LENGTH, WORDS, arguments, llama

ABOUT = About(
    title="TRL, SFTTrainer with LoRA",
    version="trl",
    kind="text",
    runs="LoRA of rank 8 on the Llama of NeMo's line, 400 texts of 64 tokens, batch 32, 20 steps",
    note="the whole run: TRL's loss computes its own gradients, which a trace of the forward "
    "pass does not show. fastclip therefore compares values in the first step, in 25 "
    "traced runs. GradSampleModule and DPOptimizer wrap what the trainer has made. The "
    "loss is TRL's",
)


class ZeroGrad(TrainerCallback):
    """Trainer clears the model's gradients alone."""

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        optimizer.zero_grad()


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{n}": n for n in range(WORDS - 3)} | {
        "<pad>": WORDS - 3,
        "<eos>": WORDS - 2,
        "<unk>": WORDS - 1,
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


def main(tiny: bool) -> dict:
    rows, batch, steps = (40, 4, 2) if tiny else (400, 32, 20)
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, WORDS - 3, (rows, LENGTH), generator=rng).tolist()
    options = arguments(batch, steps) | {
        "gradient_accumulation_steps": 1,
        "remove_unused_columns": True,
        "gradient_checkpointing": False,
        "bf16": False,
        "max_length": LENGTH,
    }
    trainer = SFTTrainer(
        model=llama(),
        args=SFTConfig(**options),
        train_dataset=Dataset.from_dict({"input_ids": tokens}),
        processing_class=tokenizer(),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"]),
    )
    trainer.model.train()
    trainer.model = trainer.model_wrapped = GradSampleModule(trainer.model)
    trained = [p for p in trainer.model.parameters() if p.requires_grad]
    optimizer = DPOptimizer(
        torch.optim.AdamW(trained, lr=1e-3),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=batch,
    )
    accountant = RDPAccountant()
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(batch / rows))
    trainer.optimizer = optimizer
    trainer.accelerator.prepare_optimizer = lambda optimizer, *_, **__: optimizer
    trainer.add_callback(ZeroGrad())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"epsilon": accountant.get_epsilon(1e-3), "loss": losses[-1] if losses else 0.0}

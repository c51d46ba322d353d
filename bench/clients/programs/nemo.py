"""NeMo Safe Synthesizer's OpacusDPTrainer on LoRA of a small Llama: entities, Poisson draws,
accumulation.
"""

import torch
from datasets import Dataset
from nemo_safe_synthesizer.privacy.dp_transformers.dp_utils import OpacusDPTrainer
from nemo_safe_synthesizer.privacy.dp_transformers.privacy_args import PrivacyArguments
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from bench.clients.about import About

ABOUT = About(
    title="NeMo Safe Synthesizer, OpacusDPTrainer",
    version="nemo-safe-synthesizer",
    kind="text",
    runs="LoRA of rank 8 on a Llama of 4 layers of 128, 400 records of 200 people, 64 tokens "
    "each, batch 16 x 2, Poisson, 40 steps, its own accountant, the adapter saved",
    note="the whole run: in the first step fastclip runs the model six times, traced, to "
    "locate the samples. Records have one length. Different lengths raise an error, "
    "because the model's loss is a mean over the batch's tokens. Installed without its "
    "engine's pins (vllm, bitsandbytes). `secure_mode=False`, because Opacus' secure mode "
    "needs torchcsprng",
)
WORDS, LENGTH = 1000, 64


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=LENGTH,
            attn_implementation="eager",
        )
    )


def records(rows: int) -> Dataset:
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, WORDS, (rows, LENGTH), generator=rng).tolist()
    return Dataset.from_dict({"input_ids": tokens, "labels": tokens})


def collated(rows: list[dict]) -> dict:
    batch = {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}
    positions = torch.arange(LENGTH).repeat(len(rows), 1)
    return {**batch, "position_ids": positions}


def arguments(batch: int, steps: int, **options) -> dict:
    """What both trainers are given."""
    return {
        "output_dir": "trained",
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": 2,
        "max_steps": steps,
        "num_train_epochs": -1,
        "learning_rate": 1e-3,
        "logging_steps": 5,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "remove_unused_columns": False,
        "disable_tqdm": True,
        "max_grad_norm": 0.0,
        **options,
    }


def main(tiny: bool) -> dict:
    rows, batch, steps = (40, 4, 2) if tiny else (400, 16, 40)
    model = get_peft_model(
        llama(), LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"])
    )
    trainer = OpacusDPTrainer(
        train_dataset=records(rows),
        model=model,
        args=TrainingArguments(**arguments(batch, steps)),
        privacy_args=PrivacyArguments(
            noise_multiplier=1.0,
            target_delta=1e-3,
            per_sample_max_grad_norm=1.0,
            poisson_sampling=True,
        ),
        data_collator=collated,
        entity_column_values=[row // 2 for row in range(rows)],
        secure_mode=False,
    )
    trainer.train()
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"epsilon": trainer.get_epsilon(), "loss": losses[-1] if losses else 0.0}

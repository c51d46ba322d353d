"""The Trainer with LoRA: evaluate, save every epoch, load the best model, resume, save the last."""

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from fastclip.integrations.huggingface import PrivacyArguments, PrivateTrainer

config = BertConfig(
    vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
    intermediate_size=32, max_position_embeddings=32, num_labels=2,
)  # fmt: skip


def build():
    torch.manual_seed(0)
    lora = LoraConfig(
        r=2, target_modules=["query"], modules_to_save=["classifier"], task_type="SEQ_CLS"
    )
    return get_peft_model(BertForSequenceClassification(config), lora)


rows = [{"input_ids": torch.randint(100, (16,)), "labels": torch.tensor(i % 2)} for i in range(128)]


def train(epochs, resume=None):
    trainer = PrivateTrainer(
        model=build(),
        args=TrainingArguments(
            "out",
            num_train_epochs=epochs,
            per_device_train_batch_size=16,
            eval_strategy="epoch",
            save_strategy="epoch",
            load_best_model_at_end=True,
            metric_for_best_model="accuracy",
            learning_rate=1e-3,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=rows[:96],
        eval_dataset=rows[96:],
        compute_metrics=lambda p: {
            "accuracy": float(np.mean(p.predictions.argmax(1) == p.label_ids))
        },
        privacy=PrivacyArguments(
            per_sample_max_grad_norm=1.0, noise_multiplier=1.0, target_delta=1e-3
        ),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


first = train(2)
spent = first.engine.get_epsilon(1e-3)
assert first.state.best_model_checkpoint is not None
second = train(3, resume="out/checkpoint-12")
assert second.engine.get_epsilon(1e-3) > spent
second.save_model("last")
print(f"done: epsilon {spent:.3f}, resumed {second.engine.get_epsilon(1e-3):.3f}")

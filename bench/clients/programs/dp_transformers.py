"""dp-transformers' OpacusDPTrainer on GPT-2: shuffled authors, its two accountants, one call of
Trainer.train.
"""

import torch
import transformers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

transformers.modeling_utils.Conv1D = Conv1D  # where it was when dp-transformers was written

from dp_transformers import PrivacyArguments, TrainingArguments  # noqa: E402
from dp_transformers.dp_utils import OpacusDPTrainer  # noqa: E402
from dp_transformers.grad_sample.transformers import conv_1d  # noqa: E402

from bench.clients.about import About  # noqa: E402
from bench.clients.programs.nemo import LENGTH, WORDS, arguments, collated, records  # noqa: E402

ABOUT = About(
    title="dp-transformers, OpacusDPTrainer",
    version="dp-transformers",
    kind="text",
    runs="GPT-2 of 2 layers of 128, 400 posts of 64 tokens, batch 16 x 2, 40 steps",
    note="1.0.0 does not run with transformers 5, with either engine. `Conv1D` has moved, "
    "`training_step` has no `num_items_in_batch`, and Accelerate wraps the optimizer. "
    "Four overrides fix this. Posts have one length, as above",
)


def samples_of(layer, activations, backprops):
    """Its own grad sampler is of an Opacus that handed over one activation."""
    return conv_1d.compute_transformers_conv1d_grad_sample(layer, activations[0], backprops)


class Trainer(OpacusDPTrainer):
    """OpacusDPTrainer for transformers 5."""

    use_cuda_amp = use_cpu_amp = use_apex = deepspeed = False

    def create_optimizer(self, model=None):
        return super().create_optimizer()

    def training_step(self, model, inputs, num_items_in_batch=None):
        return super().training_step(model, inputs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs)[0]

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_optimizer = lambda optimizer, *_, **__: optimizer


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=WORDS,
            n_positions=LENGTH,
            n_embd=128,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            tie_word_embeddings=False,
        )
    )


def main(tiny: bool) -> dict:
    from opacus.grad_sample import register_grad_sampler

    register_grad_sampler(Conv1D)(samples_of)
    rows, batch, steps = (40, 4, 2) if tiny else (400, 16, 40)
    options = arguments(batch, steps)
    options["num_train_epochs"] = 2 * batch * steps / rows
    trainer = Trainer(
        args=TrainingArguments(**options),
        model=gpt2().train(),
        train_dataset=records(rows),
        data_collator=collated,
        privacy_args=PrivacyArguments(
            noise_multiplier=1.0, target_delta=1e-3, per_sample_max_grad_norm=1.0
        ),
    )
    torch.manual_seed(0)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return {"epsilon": trainer.get_rdp_epsilon(), "loss": losses[-1] if losses else 0.0}

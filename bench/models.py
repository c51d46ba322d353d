"""The networks of the benchmarks, built offline and without in-place operations.

Index letters: b sample, c channel, h and w pixel, t position, k class.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import (
    BeitConfig,
    BeitForImageClassification,
    BertConfig,
    BertForSequenceClassification,
    ConvNextConfig,
    ConvNextForImageClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaModel,
    ViTConfig,
    ViTForImageClassification,
)

from examples.models import group_norm


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 convolutions and a shortcut, with GroupNorm.

    He et al. 2016, figure 5 right; the stride on the 3x3 as in torchvision.
    """

    def __init__(self, c_in: int, width: int, c_out: int, stride: int, norm_groups: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, width, 1, bias=False)
        self.norm1 = group_norm(width, norm_groups)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = group_norm(width, norm_groups)
        self.conv3 = nn.Conv2d(width, c_out, 1, bias=False)
        self.norm3 = group_norm(c_out, norm_groups)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(c_in, c_out, 1, stride, bias=False), group_norm(c_out, norm_groups)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [b, c_in, h, w]
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return self.relu(y + self.shortcut(x))  # [b, c_out, h / stride, w / stride]


def resnet50(
    num_classes: int = 1000,
    blocks: Sequence[int] = (3, 4, 6, 3),
    width: int = 64,
    norm_groups: int = 32,
) -> nn.Sequential:
    """ResNet-50 for ImageNet with GroupNorm instead of BatchNorm: 25.6 M parameters.

    Input [b, 3, h, w], output [b, num_classes]; 7x7 stem of stride 2 and max-pooling, stages of
    4 `width` to 32 `width` channels.
    """
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
        group_norm(width, norm_groups),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    ]
    channels = width
    for stage, count in enumerate(blocks):
        inner = width * 2**stage
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            layers.append(Bottleneck(channels, inner, 4 * inner, stride, norm_groups))
            channels = 4 * inner
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]
    return nn.Sequential(*layers, *head)


def bert(
    layers: int = 4,
    hidden: int = 256,
    heads: int = 4,
    intermediate: int = 1024,
    vocab: int = 8192,
    max_positions: int = 512,
    num_labels: int = 2,
    dropout: float = 0.1,
    dtype: torch.dtype | None = None,
) -> BertForSequenceClassification:
    """BERT with a classification head, randomly initialised from a configuration.

    Input: token numbers, int64 [b, t]; output: an object whose `logits` are [b, num_labels].
    """
    config = BertConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        max_position_embeddings=max_positions,
        num_labels=num_labels,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForSequenceClassification(config).to(dtype or torch.get_default_dtype())


def lora_bert(rank: int = 8, **options: Any) -> nn.Module:
    """`bert` of these options, of which adapters at all linear maps and the head are trained."""
    from peft import LoraConfig, TaskType, get_peft_model  # the other models run without it

    config = LoraConfig(r=rank, target_modules="all-linear", task_type=TaskType.SEQ_CLS)
    return get_peft_model(bert(**options), config)


def plainly_causal() -> dict[str, str]:
    """Of a configuration: attention to all that came before, which needs no mask.

    If transformers makes the mask, it reads the values of positions in every step. Such a step
    waits for the device, and can neither be captured nor compiled.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register("plainly_causal", sdpa_attention_forward)
    return {"attn_implementation": "plainly_causal"}


class Adapted(nn.Module):
    """A frozen linear map with a trained map of low rank (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class LoraDecoder(nn.Module):
    """A Llama with adapters at all linear maps of its blocks, which alone are trained.

    With the defaults 1.1 G parameters, as TinyLlama has, and 12.6 M of adapters.
    """

    def __init__(
        self, layers: int = 22, hidden: int = 2048, heads: int = 32, intermediate: int = 5632,
        vocab: int = 32000, max_positions: int = 2048, rank: int = 16,
    ) -> None:  # fmt: skip
        super().__init__()
        self.llama = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=vocab,
                hidden_size=hidden,
                intermediate_size=intermediate,
                num_hidden_layers=layers,
                num_attention_heads=heads,
                num_key_value_heads=max(heads // 8, 1),
                max_position_embeddings=max_positions,
                use_cache=False,
                **plainly_causal(),
            )
        ).requires_grad_(False)
        for block in self.llama.model.layers:
            for part in (block.self_attn, block.mlp):
                for name, layer in [*part.named_children()]:
                    if isinstance(layer, nn.Linear):
                        setattr(part, name, Adapted(layer, rank))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens, int64 [b, t], to logits [b, t, vocab]."""
        return self.llama(tokens).logits


def vit(
    layers: int = 4, hidden: int = 256, image: int = 64, num_labels: int = 2
) -> ViTForImageClassification:
    """ViT in patches of 8; input [b, 3, image, image], output with `logits`."""
    config = ViTConfig(num_labels=num_labels, **_patches(layers, hidden, image))
    return ViTForImageClassification(config)


def beit(layers: int = 4, hidden: int = 256, num_labels: int = 2) -> BeitForImageClassification:
    """BEiT for images of 64 pixels, with relative position biases and scales of layers."""
    config = BeitConfig(
        num_labels=num_labels, use_relative_position_bias=True, drop_path_rate=0.0,
        use_absolute_position_embeddings=True, **_patches(layers, hidden),
    )  # fmt: skip
    return BeitForImageClassification(config)


def _patches(layers: int, hidden: int, image: int = 64) -> dict[str, int]:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": 4,
        "intermediate_size": 4 * hidden, "image_size": image, "patch_size": 8,
    }  # fmt: skip


def convnext(
    widths: Sequence[int] = (48, 96, 192, 384), depths: Sequence[int] = (2, 2, 4, 2),
    num_labels: int = 2,
) -> ConvNextForImageClassification:  # fmt: skip
    """ConvNeXt; input [b, 3, h, w], output with `logits`."""
    config = ConvNextConfig(
        hidden_sizes=list(widths), depths=list(depths), num_labels=num_labels, drop_path_rate=0.0
    )
    return ConvNextForImageClassification(config)


class MambaClassifier(nn.Module):
    """Mamba with a head on its last position; the scan is transformers' own, in plain PyTorch.

    Input: token numbers, int64 [b, t]; output: [b, num_labels].
    """

    def __init__(self, layers: int, hidden: int, vocab: int, num_labels: int) -> None:
        super().__init__()
        config = MambaConfig(
            vocab_size=vocab, hidden_size=hidden, num_hidden_layers=layers, state_size=8,
            use_cache=False,
        )  # fmt: skip
        self.mamba, self.head = MambaModel(config), nn.Linear(hidden, num_labels)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.mamba(tokens).last_hidden_state[:, -1])


def mamba(
    layers: int = 2, hidden: int = 64, vocab: int = 8192, num_labels: int = 2
) -> MambaClassifier:
    """A small Mamba."""
    return MambaClassifier(layers, hidden, vocab, num_labels)


class ExplicitBert(nn.Module):
    """`bert` with the position and token type numbers given for every sample.

    By default transformers makes position numbers [1, t] and broadcasts what they embed to, and
    expands token types without copying; Opacus' embedding rules stop at both. With full tensors
    [b, t] Opacus runs, so that its time can be compared.
    """

    def __init__(self, **settings: int) -> None:
        super().__init__()
        self.bert = bert(**settings)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens, int64 [b, t], to logits [b, k]."""
        b, t = tokens.shape
        positions = torch.arange(t, device=tokens.device).repeat(b, 1)  # [b, t]
        types = torch.zeros_like(tokens)
        return self.bert(tokens, position_ids=positions, token_type_ids=types).logits


class ExplicitGpt2(nn.Module):
    """GPT-2 with its output head tied to the token embedding, positions given for every sample.

    With the defaults GPT-2 small: 12 layers, d = 768, 124 M parameters.

    Args:
        explicit: positions for every sample, which Opacus needs. Otherwise transformers makes them, and
            attention is `plainly_causal`.
    """

    def __init__(
        self, layers: int = 12, hidden: int = 768, heads: int = 12, vocab: int = 50257,
        max_positions: int = 1024, explicit: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.explicit = explicit
        self.gpt2 = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=vocab,
                n_positions=max_positions,
                n_embd=hidden,
                n_layer=layers,
                n_head=heads,
                bos_token_id=vocab - 1,
                eos_token_id=vocab - 1,
                use_cache=False,
                tie_word_embeddings=True,
                **({} if explicit else plainly_causal()),
            )
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens, int64 [b, t], to logits [b, t, vocab]."""
        if not self.explicit:
            return self.gpt2(tokens).logits
        b, t = tokens.shape
        positions = torch.arange(t, device=tokens.device).repeat(b, 1)  # [b, t]
        return self.gpt2(tokens, position_ids=positions).logits


class SampleMeanCrossEntropy(nn.Module):
    """Cross-entropy of a language model: the mean over each sample's positions, then over samples.

    A mean over all tokens of a batch would let one sample's length change another's gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reduction = "mean"  # Opacus' ghost mode sets "none"

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Logits [b, t, k] and targets [b, t] to a number, or to [b] if reduction is "none"."""
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none"
        )
        loss = loss.view(targets.shape).mean(1)  # [b]
        return loss if self.reduction == "none" else loss.mean()

"""Tiny models of transformers that stand for families, from configurations alone; adapters of peft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.member import Family

TRANSFORMERS = Family("transformers")
ADAPTERS = Family("adapters")

V, L, CLASSES = 40, 8, 3
SIZES = {
    "vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "num_labels": CLASSES,
}  # fmt: skip


def tokens(b: int) -> Tensor:
    """[b, L], no special ones among them."""
    return torch.randint(3, V, (b, L))


def pixels(size: int = 16) -> Callable[[int], Tensor]:
    return lambda b: torch.randn(b, 3, size, size, dtype=torch.float64)


def sound(b: int) -> Tensor:
    return torch.randn(b, 400, dtype=torch.float64)


def classify(model: nn.Module, x: Tensor) -> Tensor:
    """The mean cross entropy of labels made from the inputs."""
    logits = model(x).logits
    return F.cross_entropy(logits, x.flatten(1)[:, 0].long().abs() % logits.shape[-1])


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    """The mean over rows of the mean over positions."""
    logits = model(ids).logits[:, :-1]
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def translate(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, decoder_input_ids=ids.roll(1, 1)).logits
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids.reshape(-1))


def pooled(model: nn.Module, x: Tensor) -> Tensor:
    """Of a model without a head."""
    return model(x).last_hidden_state.tanh().square().flatten(1).sum(1).mean()


def made(name: str, *, stages: bool = False, **options: Any) -> Callable[[], nn.Module]:
    """A model of transformers by its name, of its own configuration class.

    Args:
        stages: its sizes are lists, one for each stage.
    """

    def build() -> nn.Module:
        import transformers

        kind = getattr(transformers, name)
        config = kind.config_class()
        sizes = {} if stages else SIZES
        known = {n: v for n, v in sizes.items() if hasattr(config, n)}
        numbers = [n for n, v in vars(config).items() if isinstance(v, (int, float))]
        known |= {
            n: 0.0 for n in numbers if "drop" in n and not isinstance(getattr(config, n), bool)
        }
        known["num_labels"] = CLASSES
        known |= options
        known = {n: v for n, v in known.items() if v is not None}
        config = kind.config_class(**known)
        config._attn_implementation = config._experts_implementation = "eager"
        return kind(config)

    return build


def family(loss: Any, inputs: Any, **models: dict[str, Any]) -> None:
    for name, options in models.items():
        tolerance = options.pop("tolerance", 1e-9)
        TRANSFORMERS.member(
            made(name, **options), name=name, inputs=inputs, loss=loss, tolerance=tolerance
        )


MAMBA = {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
STAGES = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2, "stages": True}

family(
    classify, tokens,
    DebertaV2ForSequenceClassification={
        "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8,
        "pooler_hidden_size": 16,
    },
    MPNetForSequenceClassification={},
    FNetForSequenceClassification={},
    AlbertForSequenceClassification={"embedding_size": 8},
)  # fmt: skip
family(
    next_token, tokens,
    LlamaForCausalLM={"num_key_value_heads": 1, "tolerance": 1e-5},
    OPTForCausalLM={"ffn_dim": 24, "word_embed_proj_dim": 16},
    MixtralForCausalLM={
        "num_key_value_heads": 1, "num_local_experts": 3, "tolerance": 1e-5,
    },
    GptOssForCausalLM={
        "num_key_value_heads": 1, "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 8,
        "layer_types": None, "tolerance": 1e-5,
    },
    MambaForCausalLM={"state_size": 4, "time_step_rank": 2, "tolerance": 1e-5},
    Mamba2ForCausalLM={**MAMBA, "tolerance": 1e-5},
    RwkvForCausalLM={"attention_hidden_size": 16, "tolerance": 1e-5},
    GPTNeoXForCausalLM={},
    BloomForCausalLM={"n_layer": 1, "n_head": 2},
)  # fmt: skip
family(
    translate, tokens,
    T5ForConditionalGeneration={
        "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2,
        "decoder_start_token_id": 0, "dropout_rate": 0.0, "tolerance": 1e-5,
    },
    BartForConditionalGeneration={
        "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
    },
    SwitchTransformersForConditionalGeneration={
        "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2, "num_experts": 3,
        "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "dropout_rate": 0.0,
        "router_jitter_noise": 0.0, "decoder_start_token_id": 0, "expert_capacity": 64,
        "tolerance": 1e-5,
    },
)  # fmt: skip
family(
    classify, pixels(),
    BeitForImageClassification={
        "image_size": 16, "patch_size": 8, "use_relative_position_bias": True,
        "use_shared_relative_position_bias": False, "layer_scale_init_value": 0.1,
    },
    SwinForImageClassification={"image_size": 16, "patch_size": 4, **STAGES},
    Swinv2ForImageClassification={"image_size": 16, "patch_size": 4, **STAGES},
    ConvNextV2ForImageClassification={
        "stages": True, "patch_size": 4, "num_stages": 2, "hidden_sizes": [8, 12], "depths": [1, 1],
    },
    Dinov2ForImageClassification={"image_size": 16, "patch_size": 8, "mlp_ratio": 2},
)  # fmt: skip
family(
    classify, sound,
    Wav2Vec2ForSequenceClassification={
        "conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [10, 3], "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8,
        "mask_time_prob": 0.0, "layerdrop": 0.0,
    },
)  # fmt: skip


# Adapters


def adapted(kind: str, base: str = "text", **options: Any) -> Callable[[], nn.Module]:
    """A tiny model with an adapter of peft."""

    def build() -> nn.Module:
        import peft

        model = BASES[base]()
        config = getattr(peft, kind)(**options)
        return peft.get_peft_model(model, config)

    return build


BASES: dict[str, Callable[[], nn.Module]] = {
    "text": made("BertForSequenceClassification"),
    "language": made("GPT2LMHeadModel", n_embd=16, n_layer=1, n_head=2),
    "image": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(16, CLASSES),
    ),
}  # fmt: skip


def adapter(name: str, kind: str, base: str = "text", **options: Any) -> None:
    losses: dict[str, Any] = {"text": classify, "language": next_token, "image": logits}
    inputs: dict[str, Any] = {"text": tokens, "language": tokens, "image": pixels(8)}
    ADAPTERS.member(
        adapted(kind, base, **options), name=name, inputs=inputs[base], loss=losses[base],
        tolerance=1e-5 if name == "FourierFT" else 1e-9,  # it computes in float32
    )  # fmt: skip


def logits(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x), x.flatten(1)[:, 0].long().abs() % CLASSES)


QV = ["query", "value"]
TASK = {"task_type": "SEQ_CLS"}
LORA = {"r": 2, "init_lora_weights": False, "lora_dropout": 0.0}
adapter("LoRA", "LoraConfig", target_modules=QV, **LORA, **TASK)
adapter("LoRA of embeddings", "LoraConfig", target_modules=["word_embeddings"], **LORA, **TASK)
adapter("LoRA, rank stabilised", "LoraConfig", target_modules=QV, use_rslora=True, **LORA, **TASK)
adapter("DoRA", "LoraConfig", target_modules=QV, use_dora=True, **LORA, **TASK)
adapter(
    "LoRA of Conv1D",
    "LoraConfig",
    "language",
    target_modules=["c_attn"],
    fan_in_fan_out=True,
    **LORA,
)
adapter("LoRA of convolutions", "LoraConfig", "image", target_modules=["0", "2", "5"], **LORA)
adapter(
    "DoRA of convolutions", "LoraConfig", "image", target_modules=["0", "2"], use_dora=True, **LORA
)
adapter("IA3", "IA3Config", target_modules=["query", "output.dense"],
        feedforward_modules=["output.dense"], init_ia3_weights=False, **TASK)  # fmt: skip
adapter("AdaLoRA", "AdaLoraConfig", target_modules=QV, init_r=2, target_r=2, total_step=100,
        init_lora_weights=False, **TASK)  # fmt: skip
adapter("VeRA", "VeraConfig", target_modules=QV, r=4, init_weights=False, **TASK)
adapter("LoKr", "LoKrConfig", target_modules=QV, r=2, init_weights=False, **TASK)
adapter("OFT", "OFTConfig", target_modules=QV, oft_block_size=4, r=0, init_weights=False, **TASK)
adapter("prompt tuning", "PromptTuningConfig", num_virtual_tokens=3, **TASK)
adapter("P-tuning", "PromptEncoderConfig", num_virtual_tokens=3, encoder_hidden_size=8, **TASK)
adapter(
    "prefix tuning", "PrefixTuningConfig", "language", num_virtual_tokens=3, task_type="CAUSAL_LM"
)
adapter("prefix projection", "PrefixTuningConfig", "language", num_virtual_tokens=3,
        prefix_projection=True, encoder_hidden_size=8, task_type="CAUSAL_LM")  # fmt: skip
adapter("layer norms", "LNTuningConfig", target_modules=["LayerNorm"], **TASK)
adapter("FourierFT", "FourierFTConfig", target_modules=QV, n_frequency=8, **TASK)

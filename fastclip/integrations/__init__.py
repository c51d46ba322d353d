"""fastclip in other people's training loops: transformers, PEFT, Accelerate, Lightning.

Nothing here is imported by `import fastclip`, and each module needs its own library only:

    from fastclip.integrations.huggingface import PrivacyArguments, PrivateTrainer
    from fastclip.integrations.lightning import DPLightningDataModule
    from fastclip.integrations import bias_only, head_only  # these need PyTorch alone
"""

from fastclip.integrations.huggingface import bias_only, head_only

__all__ = ["bias_only", "head_only"]

"""Integrations of fastclip with transformers, PEFT, Accelerate and Lightning.

`import fastclip` imports none of them, and each module needs only its own library:

    from fastclip.integrations.huggingface import PrivacyArguments, PrivateTrainer
    from fastclip.integrations.lightning import DPLightningDataModule
    from fastclip.integrations import bias_only, head_only  # these need PyTorch alone
"""

from fastclip.integrations.huggingface import bias_only, head_only

__all__ = ["bias_only", "head_only"]

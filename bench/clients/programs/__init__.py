"""Programs, one a file: `ABOUT`, and `main(tiny)`, which returns its epsilon and its last loss."""

NAMES = (
    "mnist",
    "cifar10",
    "image_classifier",
    "ddp",
    "char_lstm",
    "imdb",
    "text_classifier",
    "text_classifier_lora",
    "mostlyai_flat",
    "mostlyai_sequential",
    "nemo",
    "dp_transformers",
    "trl_sft",
    "flower",
    "nvflare",
    "pfllib",
    "fl4health",
)

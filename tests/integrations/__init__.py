"""fastclip inside transformers, PEFT, Accelerate and Lightning; skipped where these are missing."""

"""fastclip.opacus."""

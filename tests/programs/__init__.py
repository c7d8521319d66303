"""Programs that are legal on Gloo, run on Gloo and on this backend."""

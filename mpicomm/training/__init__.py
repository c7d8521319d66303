"""What a training loop takes from here, beside the collectives themselves."""

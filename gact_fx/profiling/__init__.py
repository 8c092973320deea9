"""From a recorded training step to sensitivities: how much each tensor's rounding error moves the gradient."""

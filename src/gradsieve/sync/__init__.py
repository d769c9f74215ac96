"""`GradientSync`: one rank's exchange in a training loop, with its optimizers and parameters."""

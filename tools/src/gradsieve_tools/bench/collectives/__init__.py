"""gloo's collectives next to ours."""

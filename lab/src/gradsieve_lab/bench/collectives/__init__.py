"""gloo's collectives beside ours."""

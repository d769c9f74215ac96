"""What one rank has of a training: engine, pipeline, parameters, optimizers, shards."""

"""What ranks agree on before and while they train: settings, equal replicas, the links between them."""

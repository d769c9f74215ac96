"""Programs around a training: `gradsieve doctor`, `plan`, `watch` and `report`."""

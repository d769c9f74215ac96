"""Programs beside a training: `gradsieve doctor`, `plan`, `watch` and `report`."""

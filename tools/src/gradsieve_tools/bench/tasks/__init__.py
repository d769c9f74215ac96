"""Real trainings: data, models, recipes."""

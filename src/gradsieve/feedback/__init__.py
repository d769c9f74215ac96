"""What a rank remembers between steps: residuals by parameter name, and how they are kept honest."""

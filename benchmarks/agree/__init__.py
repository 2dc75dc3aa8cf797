"""What it costs that ranks agree on a step."""

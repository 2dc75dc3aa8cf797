"""What a step gains by looking at a batch's rows."""

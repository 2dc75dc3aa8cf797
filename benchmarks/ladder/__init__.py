"""What steps take and cost whose single rows do not fit."""

"""What a rank that fails costs the ranks of a sharded model."""

"""How near the device without arithmetic comes to a real one."""

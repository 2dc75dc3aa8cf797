"""How evenly steps end where ranks are not equally fast."""

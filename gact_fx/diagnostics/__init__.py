"""What users are told: what was rewritten, and how far the gradient is off."""

"""Students of foundation models: as good as may be, and made of what the encrypted engine computes."""

"""For all tests."""

from hypothesis import settings

# Hypothesis would fail an example that takes longer than 200 ms, which on a busy machine says nothing.
settings.register_profile("veilfed", deadline=None)
settings.load_profile("veilfed")

"""A module that cannot be imported."""

print("on its way")
raise RuntimeError("this package is broken")

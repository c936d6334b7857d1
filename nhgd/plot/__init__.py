"""Pictures: all that is drawn with Matplotlib, and images without it."""

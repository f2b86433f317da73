"""What every room builds on: errors, files, settings and progress."""

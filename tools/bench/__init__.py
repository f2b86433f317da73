"""Speed and memory of the package against rivals."""

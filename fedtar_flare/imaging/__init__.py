"""From an image file to a tensor: readers, transforms, cache, augmentation, batches."""

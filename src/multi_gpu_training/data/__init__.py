"""Feed: which samples, in which order, to which rank, onto the device."""

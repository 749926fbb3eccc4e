"""From a manifest to the lock: shares, order, packing, row plans."""

"""Bad steps: found on the device (non-finite values, spikes), and told with their documents."""

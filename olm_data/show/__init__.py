"""Documents, rows and steps shown to people, decoded and with their origin."""

"""The rivals' environments: what each needs, at which version, and whether it runs on this machine."""

"""Plans a wrap call before it is made."""

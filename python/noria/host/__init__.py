"""Finds the memory that this process may take, and takes the home and the device buffers beside the window."""

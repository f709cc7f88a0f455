"""Running on a cluster, and beside other runs."""

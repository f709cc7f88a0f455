"""The two gates: is a corpus fit to be learnt from, is an adapter fit to be kept."""

"""The two gates: can labels be told from shape, and is an adapter better than its base?"""

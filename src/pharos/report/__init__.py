"""The page, its figures and the leaderboard, made from artifacts alone."""

"""What tables come to before they are run: what they need, how far they are, what would run and for how long."""
